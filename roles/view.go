package roles

import (
	"time"

	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/roles/part"
)

// Phase is where a role is.
type Phase string

// The phases of a role, or of a service.
const (
	NotAssigned Phase = "not assigned"
	Waiting     Phase = "waiting" // for State.Waiting
	Starting    Phase = Phase(part.Starting)
	Healthy     Phase = Phase(part.Healthy)
	BackingOff  Phase = Phase(part.BackingOff)
	Stopping    Phase = Phase(part.Stopping)
	Stopped     Phase = Phase(part.Stopped) // the Manager does not run, or is about to end
	Done        Phase = Phase(part.Done)    // by itself; until it is not assigned any more, or restarted
	Failed      Phase = Phase(part.Failed)  // for good: until it is not assigned any more, or restarted
)

// State is what is known of one role, or one service.
type State struct {
	Name     string    `json:"name"`
	Assigned bool      `json:"assigned"`
	Phase    Phase     `json:"phase"`
	Since    time.Time `json:"since,omitzero"` // of the phase
	// Waiting is what a role waits for that is assigned and does not run, each as a sentence.
	Waiting []string `json:"waiting,omitempty"`
	// Restarts is how often it was begun again since it was started.
	Restarts int `json:"restarts"`
	// Error is its last failure since it was started; empty: none.
	Error string `json:"error,omitempty"`
	// Next is when it is tried again, while it backs off.
	Next time.Time `json:"next,omitzero"`
	// Stuck: it was told to end a while ago and has not.
	Stuck bool `json:"stuck,omitempty"`
	// Generation is that of the assignment by which it was started, or stopped.
	Generation uint64 `json:"generation"`
}

// View is what a Manager does. It is shared by all who asked for it, and not to be written to.
type View struct {
	Running bool `json:"running"`
	// Known: it was known at least once which roles the node has.
	Known bool `json:"known"`
	// Generation rises whenever another assignment is taken up.
	Generation uint64 `json:"generation"`
	// Assigned are the roles that the node has, as they were taken up last, sorted.
	Assigned []string `json:"assigned"`
	// Roles are all that the program has, and assigned ones that it does not have, by name.
	Roles []State `json:"roles"`
	// Services run whatever the roles are.
	Services []State `json:"services"`
	// Conditions are what is wrong, by kind and subject, which is the role.
	Conditions []view.Condition `json:"conditions"`
}

// The kinds of conditions of a Manager.
const (
	AssignmentUnknown view.Kind = "assignment-unknown" // it is not known which roles the node has
	AssignmentRefused view.Kind = "assignment-refused" // what says so cannot be read; the last known roles are kept
	AssignmentUnkept  view.Kind = "assignment-unkept"  // the last known roles cannot be kept on disk, or were not there
	RoleUnknown       view.Kind = "role-unknown"       // a role is assigned that the program does not have
	RoleFailing       view.Kind = "role-failing"
	RoleStuck         view.Kind = "role-stuck" // it was told to end and does not
	RoleUnprivileged  view.Kind = "role-unprivileged"
	RoleWaiting       view.Kind = "role-waiting" // for another role that is not assigned, or not there
)

// Role returns the state of a role or service.
func (v View) Role(name string) (State, bool) {
	for _, states := range [][]State{v.Roles, v.Services} {
		for _, s := range states {
			if s.Name == name {
				return s, true
			}
		}
	}
	return State{}, false
}

// Settled reports whether nothing is on its way: every assigned role, and every service, is healthy, done, failed, or
// backs off, or waits for a role that is none of these.
func (v View) Settled() bool {
	if !v.Known {
		return false
	}
	for _, states := range [][]State{v.Roles, v.Services} {
		for _, s := range states {
			if s.Phase == Starting || s.Phase == Stopping || s.Assigned && s.Phase == Stopped {
				return false
			}
		}
	}
	return true
}
