package roles

import (
	"context"
	"log/slog"

	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// Role is something that a node does for as long as it has the role.
type Role interface {
	// Name is what the role is assigned by: lower-case letters, digits and "-", at most 63, beginning with a letter.
	Name() string
	// Run does what the role is for until ctx ends. What it returns then does not matter; to end earlier is a failure,
	// and Run is called again after a while, unless the error is part.ErrDone or made by part.Fatal. It is never called
	// while an earlier call has not returned.
	Run(ctx context.Context, n Node) error
}

// Depender is a Role that needs others: it is started once they are healthy, and stopped before they are.
type Depender interface{ DependsOn() []string }

// Prober is a Role that can tell whether it does what it is there for. Without it, a role is healthy once it runs.
type Prober interface {
	// Probe returns nil if so. It is called while Run runs, and is to return soon after ctx ends.
	Probe(ctx context.Context) error
}

// Privileged is a Role that cannot do without a privilege.
type Privileged interface {
	// Lacks returns what is missing and how to get it, or nil. It is called before each Run.
	Lacks() error
}

// Drainer is a Role that has something to bring to an end before it is stopped.
type Drainer interface {
	// Drain is called, while Run runs, before its ctx ends because the role is not assigned any more or the Manager
	// stops. It may take half of Config.Patience.
	Drain(ctx context.Context) error
}

// Node is what a Role may use while its Run runs. After it, nothing that is announced or published here is taken.
// All methods may be called from any goroutine.
type Node interface {
	// Announce replaces what the role announces to the mesh; see prefixes.Prefixes. ErrEnded: Run has returned.
	Announce(a ...prefixes.Announcement) error
	// Mesh returns what is known of the mesh, and a channel that closes when there is something newer. Without a mesh
	// the View is the zero one, and the channel never closes.
	Mesh() (view.View, <-chan struct{})
	// Logger says which role it is of.
	Logger() *slog.Logger
	// Dir returns a folder of the role's own, which outlives it, and makes it if need be, with mode 0700. It is an
	// error where the Manager has none.
	Dir() (string, error)
	// Publish has other roles read a value by a name; nil withdraws it. A name that another role publishes is an error.
	Publish(name string, value any) error
	// Published returns the value of that name, nil for none, and a channel that closes when it is another.
	Published(name string) (value any, changed <-chan struct{})
	// Report replaces what the role says is wrong, beside what the Manager sees by itself. Each has a Kind and a
	// Message; an empty Subject becomes the role's name, and Since is filled in.
	Report(c ...view.Condition)
	// Go runs f beside Run, with its context. An error or a panic of it ends the role with it, and the role does not end
	// before f has returned. It does nothing once Run has returned.
	Go(name string, f func(context.Context) error)
}

// Mesh is what roles need of a mesh; every mesh.Mesh has it.
type Mesh interface {
	Current() (view.View, <-chan struct{})
	Prefixes() prefixes.Prefixes
}
