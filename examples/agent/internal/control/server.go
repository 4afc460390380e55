package control

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/warren-mesh/warren/examples/agent/internal/relay"
)

// Agent is what a Server lets its clients do. An *Error is passed on as it is, any other error as Failed.
type Agent interface {
	Status() (Status, <-chan struct{}) // the channel closes when there is a newer one
	Leave(ctx context.Context) error
	Forget(ctx context.Context, node string, force bool) error
	Ping(ctx context.Context, to string) (Pong, error)
	Dial(ctx context.Context, network, to string) (net.Conn, error)
}

// calm is how long after a Status the next one comes at the earliest, where it is watched.
const calm = 50 * time.Millisecond

// longest is how long leave, forget and ping may take.
const longest = 5 * time.Minute

// Serve answers the clients of l until ctx ends, and for a little longer those that were asking. It closes
// l, and nothing it started is left when it returns.
func Serve(ctx context.Context, l net.Listener, a Agent, log *slog.Logger) error {
	s := &server{agent: a, ctx: ctx}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", s.status)
	mux.HandleFunc("POST /v1/leave", s.leave)
	mux.HandleFunc("POST /v1/forget", s.forget)
	mux.HandleFunc("POST /v1/ping", s.ping)
	mux.HandleFunc("POST /v1/dial", s.dial)
	h := &http.Server{
		Handler: mux, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	stopped := make(chan struct{})
	release := relay.OnEnd(ctx, func() {
		grace, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		_ = h.Shutdown(grace)
		close(stopped)
	})
	err := h.Serve(l)
	if ctx.Err() != nil {
		<-stopped
		err = nil
	}
	release()
	_ = h.Close()
	s.streams.Wait()
	return err
}

type server struct {
	agent   Agent
	ctx     context.Context // of Serve
	streams sync.WaitGroup
}

// until is r's context, which ends with the server's, too.
func (s *server) until(r *http.Request, most time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(r.Context(), most)
	stop := context.AfterFunc(s.ctx, cancel)
	return ctx, func() { stop(); cancel() }
}

func (s *server) status(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	out := json.NewEncoder(w)
	for {
		st, stale := s.agent.Status()
		if out.Encode(st) != nil || r.FormValue("watch") == "" {
			return
		}
		_ = http.NewResponseController(w).Flush()
		select {
		case <-stale:
		case <-r.Context().Done():
			return
		case <-s.ctx.Done():
			return
		}
		if !relay.Sleep(s.ctx, calm) {
			return
		}
	}
}

// leave is not ended by the server's end, which it brings about.
func (s *server) leave(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), longest)
	defer cancel()
	answer(w, struct{}{}, s.agent.Leave(ctx))
}

func (s *server) forget(w http.ResponseWriter, r *http.Request) {
	force := false
	if f := r.FormValue("force"); f != "" {
		var err error
		if force, err = strconv.ParseBool(f); err != nil {
			answer(w, nil, &Error{BadRequest, "force is neither true nor false"})
			return
		}
	}
	ctx, cancel := s.until(r, longest)
	defer cancel()
	answer(w, struct{}{}, s.agent.Forget(ctx, r.FormValue("node"), force))
}

func (s *server) ping(w http.ResponseWriter, r *http.Request) {
	timeout := 5 * time.Second
	if t := r.FormValue("timeout"); t != "" {
		var err error
		if timeout, err = time.ParseDuration(t); err != nil || timeout <= 0 || timeout > longest {
			answer(w, nil, &Error{BadRequest, "timeout is no duration from 1ns to 5m"})
			return
		}
	}
	ctx, cancel := s.until(r, timeout)
	defer cancel()
	pong, err := s.agent.Ping(ctx, r.FormValue("to"))
	answer(w, pong, err)
}

// dial makes of the request's connection one in the mesh.
func (s *server) dial(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := s.until(r, 30*time.Second)
	defer cancel()
	to, err := s.agent.Dial(ctx, r.FormValue("network"), r.FormValue("to"))
	if err != nil {
		answer(w, nil, err)
		return
	}
	c, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		_ = to.Close()
		answer(w, nil, err)
		return
	}
	s.streams.Go(func() {
		if _, err := c.Write([]byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: warren-dial\r\n\r\n")); err != nil {
			_, _ = c.Close(), to.Close()
			return
		}
		_, _, _ = relay.Copy(s.ctx, &peeked{Conn: c, r: buffered.Reader}, to, 0)
	})
}

// peeked is a connection of which some bytes were read ahead.
type peeked struct {
	net.Conn
	r *bufio.Reader
}

func (p *peeked) Read(b []byte) (int, error) { return p.r.Read(b) }

func (p *peeked) CloseWrite() error {
	if c, ok := p.Conn.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return p.Conn.Close()
}

func answer(w http.ResponseWriter, v any, err error) {
	w.Header().Set("Content-Type", "application/json")
	if err != nil {
		e, ok := errors.AsType[*Error](err)
		if !ok {
			e = &Error{Failed, err.Error()}
		}
		status := map[Code]int{
			BadRequest: http.StatusBadRequest, NoSuchNode: http.StatusNotFound, Refused: http.StatusConflict, NoAnswer: http.StatusGatewayTimeout,
		}[e.Code]
		if status == 0 {
			status = http.StatusInternalServerError
		}
		w.WriteHeader(status)
		v = e
	}
	_ = json.NewEncoder(w).Encode(v) // fails if the client is gone
}
