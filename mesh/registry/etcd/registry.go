package etcd

import (
	"context"
	"errors"
	"iter"

	"github.com/warren-mesh/warren/mesh/registry"
)

// Registry is a registry on an etcd. It implements [registry.Registry] and [registry.Swapper].
type Registry struct{ set *settings }

var (
	_ registry.Registry = (*Registry)(nil)
	_ registry.Swapper  = (*Registry)(nil)
)

// New checks c and returns a registry. It does not wait, and asks nothing of the network: that a server
// is gone is found by Watch, Put, Delete and Swap.
func New(c Config) (*Registry, error) {
	set, err := c.check()
	if err != nil {
		return nil, err
	}
	return &Registry{set}, nil
}

// Reload replaces endpoints, credentials and certificates, and reads the files again.
func (r *Registry) Reload(c Config) error { return errors.ErrUnsupported }

// Close closes the connections.
func (r *Registry) Close() error { return nil }

// Put implements [registry.Registry].
func (r *Registry) Put(ctx context.Context, e registry.Entry) error { return errors.ErrUnsupported }

// Delete implements [registry.Registry].
func (r *Registry) Delete(ctx context.Context, id string) error { return errors.ErrUnsupported }

// Swap implements [registry.Swapper].
func (r *Registry) Swap(ctx context.Context, id string, old, new []byte) (current []byte, ok bool, err error) {
	return nil, false, errors.ErrUnsupported
}

// Watch implements [registry.Registry].
func (r *Registry) Watch(ctx context.Context, kind string) iter.Seq2[registry.Batch, error] {
	return func(yield func(registry.Batch, error) bool) { yield(registry.Batch{}, errors.ErrUnsupported) }
}
