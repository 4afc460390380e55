package control

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// Client talks to a running agent. Where none is, the errors are ErrNotRunning; what the agent says is an
// *Error.
type Client struct{ Path string } // of the socket

// call asks, and returns an answer of 2xx.
func (c Client) call(ctx context.Context, method, path string, query url.Values) (*http.Response, error) {
	h := http.Client{Transport: &http.Transport{
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx, c.Path) },
		DisableKeepAlives: true,
	}}
	req, err := http.NewRequestWithContext(ctx, method, "http://agent"+path+"?"+query.Encode(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := h.Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err // the rest of it is of no use to anybody
		}
		if ctx.Err() != nil {
			err = fmt.Errorf("the agent did not answer: %w", context.Cause(ctx))
		} else if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = errors.New("the agent ended before it answered")
		}
		return nil, err
	}
	if resp.StatusCode/100 != 2 {
		defer resp.Body.Close()
		return nil, readError(resp)
	}
	return resp, nil
}

func readError(resp *http.Response) error {
	var e Error
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&e); err != nil || e.Message == "" {
		return fmt.Errorf("the agent answers %q, which is no agent's answer", resp.Status)
	}
	return &e
}

func (c Client) ask(ctx context.Context, method, path string, query url.Values, to any) error {
	resp, err := c.call(ctx, method, path, query)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(to); err != nil {
		return fmt.Errorf("the agent's answer cannot be read: %w", err)
	}
	return nil
}

// Status asks for the Status.
func (c Client) Status(ctx context.Context) (s Status, err error) {
	return s, c.ask(ctx, http.MethodGet, "/v1/status", nil, &s)
}

// Watch yields the Status now and whenever there is a newer one, until ctx or the agent ends, which is the
// error that comes last.
func (c Client) Watch(ctx context.Context) iter.Seq2[Status, error] {
	return func(yield func(Status, error) bool) {
		resp, err := c.call(ctx, http.MethodGet, "/v1/status", url.Values{"watch": {"1"}})
		if err != nil {
			yield(Status{}, err)
			return
		}
		defer resp.Body.Close()
		d := json.NewDecoder(resp.Body)
		for {
			var s Status
			switch err := d.Decode(&s); {
			case ctx.Err() != nil:
				yield(s, context.Cause(ctx))
				return
			case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
				yield(s, errors.New("the agent ended"))
				return
			case err != nil:
				yield(s, fmt.Errorf("the agent's answer cannot be read: %w", err))
				return
			}
			if !yield(s, nil) {
				return
			}
		}
	}
}

// Leave has the node leave the mesh.
func (c Client) Leave(ctx context.Context) error {
	var none struct{}
	return c.ask(ctx, http.MethodPost, "/v1/leave", nil, &none)
}

// Forget has the record of another node deleted.
func (c Client) Forget(ctx context.Context, node string, force bool) error {
	var none struct{}
	return c.ask(ctx, http.MethodPost, "/v1/forget", url.Values{"node": {node}, "force": {strconv.FormatBool(force)}}, &none)
}

// Ping has a node answer.
func (c Client) Ping(ctx context.Context, to string, timeout time.Duration) (p Pong, err error) {
	return p, c.ask(ctx, http.MethodPost, "/v1/ping", url.Values{"to": {to}, "timeout": {timeout.String()}}, &p)
}

// Dial connects, through the mesh, to host:port.
func (c Client) Dial(ctx context.Context, network, to string) (net.Conn, error) {
	conn, err := dial(ctx, c.Path)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	up, err := upgrade(conn, network, to)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = conn.Close()
		if ctx.Err() != nil {
			err = fmt.Errorf("connecting to %s: %w", to, context.Cause(ctx))
		}
		return nil, err
	}
	return up, nil
}

func upgrade(conn net.Conn, network, to string) (net.Conn, error) {
	req, err := http.NewRequest(http.MethodPost, "http://agent/v1/dial?"+url.Values{"network": {network}, "to": {to}}.Encode(), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "warren-dial")
	if err := req.Write(conn); err != nil {
		return nil, err
	}
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, req)
	if err != nil {
		return nil, fmt.Errorf("the agent's answer cannot be read: %w", err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer resp.Body.Close()
		return nil, readError(resp)
	}
	return &peeked{Conn: conn, r: r}, nil
}
