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
	"sync"
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
	// check says why reload could not take a configuration up.
	check(config.Config) error
	// reload takes up what may change while it is in use. What is under way ends with what was before.
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
	s := &etcdStore{Registry: r, prefix: cfg.Prefix, log: log}
	s.set(c, cfg)
	return s, nil
}

// alone is a registry that ends with the process.
type alone struct{ *memory.Registry }

func (alone) Close() error                   { return nil }
func (a alone) reload(c config.Config) error { return a.check(c) }
func (alone) check(c config.Config) error {
	if c.Registry != "memory" {
		return errOtherKind
	}
	return nil
}

var errOtherKind = errors.New("another kind of registry is taken up at the next start")

// etcdStore says what a user of etcd needs, where etcd does not let it in.
type etcdStore struct {
	*etcd.Registry
	prefix string
	log    *slog.Logger
	mu     sync.Mutex
	remedy string
}

func (s *etcdStore) check(c config.Config) error {
	if c.Registry == "memory" {
		return errOtherKind
	}
	cfg, err := etcdConfig(c, s.log)
	if err == nil && cfg.Prefix != s.prefix {
		err = fmt.Errorf("the prefix %s in place of %s is taken up at the next start", cfg.Prefix, s.prefix)
	}
	return err
}

func (s *etcdStore) reload(c config.Config) error {
	if err := s.check(c); err != nil {
		return err
	}
	cfg, err := etcdConfig(c, s.log)
	if err == nil {
		err = s.Reload(cfg)
	}
	if err == nil {
		s.set(c, cfg)
	}
	return err
}

func (s *etcdStore) set(c config.Config, cfg etcd.Config) {
	who := "this node needs a user of etcd, by registry-user or a certificate of one,"
	if cfg.Username != "" {
		who = fmt.Sprintf("user %q needs the right password,", cfg.Username)
	}
	at := strings.TrimSuffix(cfg.Prefix, "/") + "/"
	node := registry.KindNode + "/" + c.Node
	if c.Node == "" {
		node = registry.KindNode + "/ID"
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remedy = fmt.Sprintf("%s and permission to read the prefix %s, to read and write %s, and for the first node of the mesh %s", who, at, at+node, at+registry.ID(markKind, markName))
}

func (s *etcdStore) explain(err error) error {
	if !errors.Is(err, etcd.ErrUnauthorised) {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Errorf("%w (%s)", err, s.remedy)
}

// Put implements registry.Registry.
func (s *etcdStore) Put(ctx context.Context, e registry.Entry) error {
	return s.explain(s.Registry.Put(ctx, e))
}

// Delete implements registry.Registry.
func (s *etcdStore) Delete(ctx context.Context, id string) error {
	return s.explain(s.Registry.Delete(ctx, id))
}

// Swap implements registry.Swapper.
func (s *etcdStore) Swap(ctx context.Context, id string, old, new []byte) ([]byte, bool, error) {
	is, ok, err := s.Registry.Swap(ctx, id, old, new)
	return is, ok, s.explain(err)
}

// Watch implements registry.Registry.
func (s *etcdStore) Watch(ctx context.Context, kind string) iter.Seq2[registry.Batch, error] {
	return func(yield func(registry.Batch, error) bool) {
		for b, err := range s.Registry.Watch(ctx, kind) {
			if !yield(b, s.explain(err)) {
				return
			}
		}
	}
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
	if c.Policy() && c.NetNS == "" { // else the agent's packets have nothing to do with the mesh's rules
		cfg.Dial = besideMesh(c.Mark)
	}
	return cfg, nil
}

var (
	// errOtherMesh says that a registry holds the data of another mesh.
	errOtherMesh = errors.New("the registry holds another mesh")
	// errNoMesh says that a registry holds the data of none.
	errNoMesh = errors.New("the registry holds nothing of the mesh")
	// errReloaded is why a call ends that a reload overtook.
	errReloaded = errors.New("another registry was configured meanwhile")
)

// The entry by which a mesh marks what is its own. It has the mesh's name and nothing else.
const (
	markKind = "mesh"
	markName = "name"
)

// lookFor is how long a registry that is newly configured is tried before it is taken as it is.
const lookFor = 5 * time.Second

// guard is a registry that lets nothing in or out before it is known to be that of the mesh: two meshes
// in one would take each other's nodes for their own. The first node marks a registry. Where it cannot be
// reached that is found out later, by whatever would have been done.
type guard struct {
	store   store
	mesh    string
	founds  bool                               // a registry that no mesh has marked is marked, not refused
	open    func(config.Config) (store, error) // opens what reload is to take up
	foreign func(error)                        // told once or more that it is another mesh's

	mu      sync.Mutex
	where   string // the registry, for messages
	known   bool
	flights map[*context.CancelCauseFunc]struct{} // what asks the store now
}

// at returns which registry it is, without a password.
func (g *guard) at() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.where
}

// Rejoin implements registry.Rejoiner, as far as the store does.
func (g *guard) Rejoin() time.Duration {
	if r, ok := g.store.(interface{ Rejoin() time.Duration }); ok {
		return r.Rejoin()
	}
	return 0
}

// flight has f ask the store. A reload ends it, before the store is another one.
func (g *guard) flight(ctx context.Context, f func(context.Context) error) (reloaded bool, err error) {
	on, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	g.mu.Lock()
	if g.flights == nil {
		g.flights = make(map[*context.CancelCauseFunc]struct{})
	}
	g.flights[&cancel] = struct{}{}
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		delete(g.flights, &cancel)
	}()
	err = f(on)
	return context.Cause(on) == errReloaded, err
}

// again has f ask the store until no reload comes between.
func (g *guard) again(ctx context.Context, f func(context.Context) error) error {
	for {
		if reloaded, err := g.flight(ctx, f); err == nil || !reloaded {
			return err
		}
	}
}

// reload takes up the registry that c says, unless it is another mesh's. One that cannot be reached is taken
// up, and looked at before anything else is asked of it; unseen says why it could not be reached.
func (g *guard) reload(ctx context.Context, c config.Config) (unseen, err error) {
	if err := g.store.check(c); err != nil {
		return nil, err
	}
	where := config.RedactURL(c.Registry)
	known, unseen, err := g.look(ctx, c, where)
	if err != nil {
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for cancel := range g.flights {
		(*cancel)(errReloaded)
	}
	was, wasKnown := g.where, g.known
	g.where, g.known = where, known
	if err := g.store.reload(c); err != nil {
		g.where, g.known = was, wasKnown
		return nil, err
	}
	return unseen, nil
}

// look finds out whether the registry that c says is known to be this mesh's. It is an error if it is
// another one's, or is none.
func (g *guard) look(ctx context.Context, c config.Config, where string) (known bool, unseen, err error) {
	if c.Registry == "memory" {
		return false, nil, nil // nobody else's
	}
	s, err := g.open(c)
	if err != nil {
		return false, nil, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	ctx, cancel := context.WithTimeoutCause(ctx, lookFor, fmt.Errorf("not reached within %v", lookFor))
	defer cancel()
	for delays := newBackoff(); ; {
		is, ok, err := mark(ctx, s)
		switch {
		case err == nil && ok:
			return true, nil, g.compare(is, where)
		case err == nil, errors.Is(err, etcd.ErrUnauthorised):
			return false, err, nil
		}
		select {
		case <-time.After(delays.NextBackOff()):
		case <-ctx.Done():
			return false, fmt.Errorf("%w: %w", context.Cause(ctx), err), nil
		}
	}
}

// mark returns whose mark a registry has, if any.
func mark(ctx context.Context, r registry.Registry) (string, bool, error) {
	for b, err := range r.Watch(ctx, markKind) {
		if err != nil {
			return "", false, err
		}
		if !b.Reset {
			continue
		}
		for _, e := range b.Put {
			if e.ID == registry.ID(markKind, markName) {
				return string(e.Data), true, nil
			}
		}
		return "", false, nil
	}
	return "", false, fmt.Errorf("reading whose the registry is: %w", ctx.Err())
}

// compare says that a mark is another mesh's.
func (g *guard) compare(is, where string) error {
	name := strings.TrimSpace(is)
	if name == g.mesh {
		return nil
	}
	if len(name) > 64 {
		name = name[:64]
	}
	return fmt.Errorf("%w: %s is that of mesh %q, and this node is of mesh %q; say --mesh=%s to join that one, or give the registry's URL another prefix",
		errOtherMesh, where, name, g.mesh, name)
}

// verify finds the registry marked, or marks it.
func (g *guard) verify(ctx context.Context) error {
	where := g.at()
	is, ok, err := mark(ctx, g.store)
	if err == nil && !ok && g.founds {
		// To write is more than who comes later may do, so that it is not done before it has to be.
		var now []byte
		if now, ok, err = g.store.Swap(ctx, registry.ID(markKind, markName), nil, []byte(g.mesh)); err == nil {
			is, ok = string(now), true
		}
	}
	switch {
	case err != nil:
		return err
	case !ok:
		return fmt.Errorf("%w: %s has no mark of mesh %q, nor of any other; see whether --registry and --mesh are right", errNoMesh, where, g.mesh)
	}
	err = g.compare(is, where)
	g.mu.Lock()
	if overtaken := ctx.Err(); overtaken != nil { // then it is of no matter what was found
		g.mu.Unlock()
		return overtaken
	}
	g.known = err == nil
	g.mu.Unlock()
	if err != nil && g.foreign != nil {
		g.foreign(err)
	}
	return err
}

func (g *guard) isKnown() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.known
}

// once returns f that begins when the store is known to be the mesh's.
func (g *guard) once(f func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		if !g.isKnown() {
			if err := g.verify(ctx); err != nil {
				return err
			}
		}
		return f(ctx)
	}
}

// Put implements registry.Registry.
func (g *guard) Put(ctx context.Context, e registry.Entry) error {
	return g.again(ctx, g.once(func(ctx context.Context) error { return g.store.Put(ctx, e) }))
}

// Delete implements registry.Registry.
func (g *guard) Delete(ctx context.Context, id string) error {
	return g.again(ctx, g.once(func(ctx context.Context) error { return g.store.Delete(ctx, id) }))
}

// Swap implements registry.Swapper. It is not done again after a reload, as it may have been done.
func (g *guard) Swap(ctx context.Context, id string, old, new []byte) (is []byte, ok bool, err error) {
	_, err = g.flight(ctx, g.once(func(ctx context.Context) (err error) {
		is, ok, err = g.store.Swap(ctx, id, old, new)
		return err
	}))
	return is, ok, err
}

// Close closes the store.
func (g *guard) Close() error { return g.store.Close() }

// Watch implements registry.Registry. With each Reset, before which anything may have become of the
// store, the mark is looked at again.
func (g *guard) Watch(ctx context.Context, kind string) iter.Seq2[registry.Batch, error] {
	return func(yield func(registry.Batch, error) bool) {
		for b, err := range g.store.Watch(ctx, kind) {
			if err == nil && (b.Reset || !g.isKnown()) {
				delays := newBackoff()
				for {
					err := g.again(ctx, g.verify)
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

// retry calls f until it succeeds, the registry is not the mesh's, or ctx ends.
func retry(ctx context.Context, f func(context.Context) error) error {
	delays := newBackoff()
	for {
		err := f(ctx)
		if err == nil || errors.Is(err, errOtherMesh) || errors.Is(err, errNoMesh) {
			return err
		}
		select {
		case <-time.After(delays.NextBackOff()):
		case <-ctx.Done():
			return err
		}
	}
}
