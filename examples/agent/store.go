package main

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"os"
	"path"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/warren-mesh/warren/examples/agent/internal/config"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/etcd"
	"github.com/warren-mesh/warren/mesh/registry/memory"
)

// store is a registry as the agent needs it.
type store interface {
	registry.Registry
	registry.Swapper
	// reload takes up what may change while it is in use. The error says what may not.
	reload(config.Config) error
	Close() error
}

// openStore opens what the setting registry says. It asks nothing of the network.
func openStore(c config.Config, log *slog.Logger) (store, error) {
	if c.Registry == "memory" {
		return alone{memory.New()}, nil
	}
	cfg, err := etcdConfig(c, log)
	if err != nil {
		return nil, err
	}
	r, err := etcd.New(cfg)
	if err != nil {
		return nil, fmt.Errorf("registry %s: %w", config.RedactURL(c.Registry), err)
	}
	return &etcdStore{Registry: r, prefix: cfg.Prefix, log: log}, nil
}

// alone is a registry that ends with the process.
type alone struct{ *memory.Registry }

func (alone) Close() error { return nil }
func (alone) reload(c config.Config) error {
	if c.Registry != "memory" {
		return errors.New("another kind of registry")
	}
	return nil
}

type etcdStore struct {
	*etcd.Registry
	prefix string
	log    *slog.Logger
}

func (s *etcdStore) reload(c config.Config) error {
	if c.Registry == "memory" {
		return errors.New("another kind of registry")
	}
	cfg, err := etcdConfig(c, s.log)
	if err != nil {
		return err
	}
	if cfg.Prefix != s.prefix {
		return fmt.Errorf("the prefix %s in place of %s", cfg.Prefix, s.prefix)
	}
	return s.Reload(cfg)
}

// etcdConfig is what the URL and the settings beside it say together.
func etcdConfig(c config.Config, log *slog.Logger) (etcd.Config, error) {
	cfg, err := etcd.ParseURL(c.Registry)
	if err != nil {
		return cfg, fmt.Errorf("registry %s: %w", config.RedactURL(c.Registry), err)
	}
	if cfg.Prefix == "" {
		cfg.Prefix = path.Join(etcd.DefaultPrefix, c.Mesh)
	}
	for _, f := range []struct {
		name string
		to   *string
		v    string
	}{
		{"registry-ca", &cfg.TLS.CAFile, c.RegistryCA}, {"registry-cert", &cfg.TLS.CertFile, c.RegistryCert},
		{"registry-key", &cfg.TLS.KeyFile, c.RegistryKey}, {"registry-user", &cfg.Username, c.RegistryUser},
		{"registry-password-file", &cfg.PasswordFile, c.RegistryPasswordFile},
	} {
		switch {
		case f.v == "":
		case *f.to != "" && *f.to != f.v:
			return cfg, fmt.Errorf("%w: %s (%s) is not what the URL of registry (%s) says; keep one of them", config.ErrConfig, f.name, c.Origin(f.name), c.Origin("registry"))
		default:
			*f.to = f.v
		}
	}
	// A file that is not there may come later, but at the start a mistyped path is likelier.
	for _, f := range []string{cfg.TLS.CAFile, cfg.TLS.CertFile, cfg.TLS.KeyFile, cfg.PasswordFile} {
		if f == "" {
			continue
		}
		if _, err := os.Stat(f); err != nil {
			return cfg, fmt.Errorf("%w: registry %s: %w", config.ErrConfig, config.RedactURL(c.Registry), err)
		}
	}
	cfg.Logger = log
	return cfg, nil
}

// errOtherMesh says that a registry holds the data of another mesh.
var errOtherMesh = errors.New("the registry holds another mesh")

// The entry by which a mesh marks what is its own. It has the mesh's name and nothing else.
const (
	markKind = "mesh"
	markName = "name"
)

// guard is a registry that lets nothing in or out before it is known to be that of the mesh: two meshes
// in one would take each other's nodes for their own. The first node marks a registry. Where it cannot be
// reached that is found out later, by whatever would have been done.
type guard struct {
	store
	mesh    string
	where   string      // the registry, for messages
	foreign func(error) // told once or more that it is another mesh's
	known   atomic.Bool
}

// verify marks the registry, or finds it marked.
func (g *guard) verify(ctx context.Context) error {
	is, ok, err := g.store.Swap(ctx, registry.ID(markKind, markName), nil, []byte(g.mesh))
	switch {
	case err != nil:
		return err
	case !ok && strings.TrimSpace(string(is)) != g.mesh:
		g.known.Store(false)
		if len(is) > 64 {
			is = is[:64]
		}
		err := fmt.Errorf("%w: %s is that of mesh %q, and this node is of mesh %q; say --mesh=%s to join that one, or give the registry's URL another prefix",
			errOtherMesh, g.where, is, g.mesh, strings.TrimSpace(string(is)))
		if g.foreign != nil {
			g.foreign(err)
		}
		return err
	}
	g.known.Store(true)
	return nil
}

func (g *guard) sure(ctx context.Context) error {
	if g.known.Load() {
		return nil
	}
	return g.verify(ctx)
}

// Put implements registry.Registry.
func (g *guard) Put(ctx context.Context, e registry.Entry) error {
	if err := g.sure(ctx); err != nil {
		return err
	}
	return g.store.Put(ctx, e)
}

// Delete implements registry.Registry.
func (g *guard) Delete(ctx context.Context, id string) error {
	if err := g.sure(ctx); err != nil {
		return err
	}
	return g.store.Delete(ctx, id)
}

// Swap implements registry.Swapper.
func (g *guard) Swap(ctx context.Context, id string, old, new []byte) ([]byte, bool, error) {
	if err := g.sure(ctx); err != nil {
		return nil, false, err
	}
	return g.store.Swap(ctx, id, old, new)
}

// Watch implements registry.Registry. With each Reset, before which anything may have become of the
// store, the mark is looked at again.
func (g *guard) Watch(ctx context.Context, kind string) iter.Seq2[registry.Batch, error] {
	return func(yield func(registry.Batch, error) bool) {
		for b, err := range g.store.Watch(ctx, kind) {
			if err == nil && b.Reset {
				delays := newBackoff()
				for {
					err := g.verify(ctx)
					if err == nil {
						break
					}
					if ctx.Err() != nil || !yield(registry.Batch{}, err) {
						return
					}
					select {
					case <-time.After(delays.NextBackOff()):
					case <-ctx.Done():
						return
					}
				}
			}
			if !yield(b, err) {
				return
			}
		}
	}
}

// newBackoff has no total time limit: a registry may be away for days.
func newBackoff() *backoff.ExponentialBackOff {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval, b.MaxInterval = 500*time.Millisecond, 30*time.Second
	b.Reset()
	return b
}

// retry calls f until it succeeds, the registry is another mesh's, or ctx ends.
func retry(ctx context.Context, f func(context.Context) error) error {
	delays := newBackoff()
	for {
		err := f(ctx)
		if err == nil || errors.Is(err, errOtherMesh) {
			return err
		}
		select {
		case <-time.After(delays.NextBackOff()):
		case <-ctx.Done():
			return err
		}
	}
}
