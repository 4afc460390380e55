//go:build !linux

package namespace

import (
	"errors"
	"fmt"
)

// Namespace is for Linux: elsewhere there is only nil, which is the one there is.
type Namespace struct{}

// Open returns an error that is errors.ErrUnsupported, unless path is empty.
func Open(path string) (*Namespace, error) {
	if path == "" {
		return nil, nil
	}
	return nil, fmt.Errorf("network namespace %s: only Linux has namespaces: %w", path, errors.ErrUnsupported)
}

// Close does nothing.
func (*Namespace) Close() error { return nil }

// Do runs f.
func (*Namespace) Do(f func() error) error { return f() }
