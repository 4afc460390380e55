package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-mesh/warren/examples/agent/internal/config"
	"github.com/warren-mesh/warren/examples/agent/internal/control"
)

func newFetch() *cobra.Command {
	cmd := &cobra.Command{
		Use: "fetch URL", Short: "Fetch a URL from the mesh", Args: args(cobra.ExactArgs(1)),
		Long: `Fetch fetches a URL through the running agent and writes what it gets to standard output. The host is an
address in the mesh, the name of a node, or that and the name of the mesh: http://alpha.warren/. No other
name is looked up, and nothing outside of the mesh is reached.

A status of 400 or above is a failure, and its body is not written. Redirects are followed, 10 at most.
A file that -o names is there whole or not at all.`,
		Example: "  agent fetch http://alpha/\n  agent fetch -o image.iso --max-time 10m http://[fd00::1]:8080/image.iso",
	}
	flags := config.Bind(cmd.Flags(), config.ToFind)
	file := cmd.Flags().StringP("output", "o", "", "file to write to, in place of standard output")
	most := cmd.Flags().DurationP("max-time", "m", 0, "how long it may take in all; 0 is without limit")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		u, err := url.Parse(args[0])
		if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return &usageError{fmt.Errorf("%q is no URL such as http://alpha/", args[0])}
		}
		if *most < 0 {
			return &usageError{errors.New("max-time is below zero")}
		}
		c, err := flags.Load(config.ThisHost())
		if err != nil {
			return err
		}
		ctx := cmd.Context()
		if *most > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeoutCause(ctx, *most, fmt.Errorf("not done within %v", *most))
			defer cancel()
		}
		err = fetch(ctx, clientOf(c), u, *file, cmd.OutOrStdout())
		if err != nil && ctx.Err() != nil {
			err = fmt.Errorf("fetching %s: %w", u.Redacted(), context.Cause(ctx))
		}
		return notRunning(c, err)
	}
	return cmd
}

func fetch(ctx context.Context, agent control.Client, u *url.URL, file string, stdout io.Writer) error {
	client := http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, to string) (net.Conn, error) { return agent.Dial(ctx, "tcp", to) },
		// What is fetched is written as it is sent.
		DisableCompression: true, DisableKeepAlives: true,
		TLSHandshakeTimeout: 10 * time.Second,
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return err
	}
	req.Header.Set("User-Agent", "warren-agent")
	resp, err := client.Do(req)
	if err != nil {
		if e, ok := errors.AsType[*url.Error](err); ok {
			err = e.Err
		}
		return fmt.Errorf("fetching %s: %w", u.Redacted(), err)
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 400 {
		return fmt.Errorf("fetching %s: the answer is %q", u.Redacted(), resp.Status)
	}
	if file == "" {
		return copyBody(u, stdout, resp)
	}
	f, err := os.CreateTemp(filepath.Dir(file), "."+filepath.Base(file)+"-*")
	if err != nil {
		return err
	}
	err = errors.Join(copyBody(u, f, resp), f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), file)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

func copyBody(u *url.URL, to io.Writer, resp *http.Response) error {
	n, err := io.Copy(to, resp.Body)
	if err != nil {
		return fmt.Errorf("fetching %s: it ended after %d bytes: %w", u.Redacted(), n, err)
	}
	return nil
}
