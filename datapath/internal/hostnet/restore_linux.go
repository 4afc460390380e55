package hostnet

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/warren-mesh/warren/datapath"
)

const (
	// settling is how long to wait for what else another program takes away.
	settling = 5 * time.Millisecond
	// contested is how many restorations within contestedFor are another program's doing again and again.
	contested    = 4
	contestedFor = time.Minute
)

// restorer puts back rules and guards that somebody else removes, without waiting for a reading: until they are back,
// packets go ways that they must not.
type restorer struct {
	undone  chan struct{} // capacity 1: something was removed
	stop    chan struct{}
	done    chan struct{}
	repairs *Repairs

	// Guarded by Host.mu.
	on bool        // Up has made them, and Remove has not removed them
	at []time.Time // restorations of the last minute
}

func (h *Host) startRestorer() {
	h.restorer = restorer{undone: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{})}
	h.restorer.repairs = NewRepairs(h.missed)
	go func() {
		defer close(h.restorer.done)
		for {
			select {
			case <-h.restorer.stop:
				return
			case <-h.restorer.undone:
			}
			select {
			case <-h.restorer.stop:
				return
			case <-time.After(settling):
			}
			if h.restorer.repairs.Now() {
				if err := h.restore(context.Background()); err != nil && !h.closed.Load() {
					h.o.Logger.Warn("what somebody else removed cannot be put back", "err", err)
				}
			}
		}
	}()
}

// missed notes that something of ours was removed.
func (h *Host) missed() {
	select {
	case h.restorer.undone <- struct{}{}:
	default:
	}
}

func (h *Host) stopRestorer() {
	close(h.restorer.stop)
	<-h.restorer.done
}

// restore puts back what is missing of rules and guards.
func (h *Host) restore(ctx context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.restorer.on {
		return nil
	}
	f, err := h.find(ctx)
	if err != nil {
		return err
	}
	b, err := h.besides(ctx, f)
	if err != nil {
		return err
	}
	rules, guards := h.wanted(f).missing(b)
	if len(rules)+len(guards) == 0 {
		return nil
	}
	h.o.Logger.Info("rules were removed by somebody else, and are put back", "interface", h.o.Interface, "rules", len(rules), "guards", len(guards))
	h.restorer.at = append(h.restorer.recent(), time.Now())
	return h.addMissing(ctx, rules, guards)
}

// recent are the restorations of the last minute.
func (r *restorer) recent() []time.Time {
	return slices.DeleteFunc(r.at, func(at time.Time) bool { return time.Since(at) > contestedFor })
}

// problem says that another program removes them again and again.
func (r *restorer) problem(protocol int, ps *problems) {
	if r.at = r.recent(); len(r.at) < contested {
		return
	}
	*ps = append(*ps, datapath.Problem{
		Subject: "rules", Message: fmt.Sprintf("another program removed rules of ours %d times in the last minute; packets go other ways until they are back", len(r.at)),
		Remedy: fmt.Sprintf("have it leave alone what has protocol %d (systemd-networkd: ManageForeignRoutingPolicyRules=no and ManageForeignRoutes=no in networkd.conf)", protocol),
	})
}
