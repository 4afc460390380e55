// Package meshservice is a mesh as a service of a roles.Manager: it runs whatever the roles are.
package meshservice

import (
	"context"
	"errors"

	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/roles/part"
)

// Name is that of the service.
const Name = "mesh"

// New returns m as a part, for roles.Config.Services. A Run of it that ends is begun again after a while, but for those
// that another attempt would not change: the node left the mesh (mesh.ErrLeft), its state folder is in use or another's
// (mesh.ErrStateInUse, mesh.ErrStateForeign), or m already runs elsewhere (mesh.ErrRunning). These end the Manager.
//
// A mesh is healthy once it has the state folder and its key: neither a registry that is away nor a device that fails
// is a reason to restart it, as it goes on trying by itself, and says so in its View.
func New(m mesh.Mesh) part.Part {
	return part.Part{
		Name: Name,
		Run: func(ctx context.Context) error {
			err := m.Run(ctx)
			for _, final := range []error{mesh.ErrLeft, mesh.ErrStateInUse, mesh.ErrStateForeign, mesh.ErrRunning} {
				if errors.Is(err, final) {
					return part.Fatal(err)
				}
			}
			return err
		},
		Probe: func(context.Context) error {
			if v, _ := m.Current(); v.Self.Key.IsZero() {
				return errors.New("has no key yet")
			}
			return nil
		},
	}
}
