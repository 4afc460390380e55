package main

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/warren-mesh/warren/examples/agent/internal/relay"
	"github.com/warren-mesh/warren/examples/agent/internal/ula"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/roles/hostaddr"
)

// lookAgain is how often the host's addresses are looked at. Not every system tells of their changes.
const lookAgain = 10 * time.Second

// hostEndpoints are the host's addresses where the UDP sockets are, without those that this mesh or another gave it.
func (a *agent) hostEndpoints() ([]mesh.Endpoint, error) {
	var ls []hostaddr.Link
	var sources []netip.Addr
	err := a.under.Do(func() (err error) {
		if ls, err = hostaddr.Links(); err != nil {
			return err
		}
		meshes := meshInterfaces()
		ls = slices.DeleteFunc(ls, func(l hostaddr.Link) bool { return slices.Contains(meshes, l.Name) })
		var mark func(network, address string, c syscall.RawConn) error
		if a.cfg.Policy() && a.cfg.UnderlayNetNS == "" { // encrypted packets have routes of their own
			mark = markWith(a.cfg.Mark)
		}
		sources, err = hostaddr.Sources(mark)
		return err
	})
	if err != nil {
		return nil, err
	}
	in := ula.Prefix(a.cfg.Mesh)
	skip := func(x netip.Addr) bool { return in.Contains(x) || slices.Contains(a.own, x) }
	var es []mesh.Endpoint
	for _, x := range hostaddr.Choose(ls, sources, skip, record.MaxEndpoints) {
		es = append(es, mesh.Endpoint{Addr: x})
	}
	return es, nil
}

// hostWatch is what a node has published of where its host is, and how sure that is.
type hostWatch struct {
	published []mesh.Endpoint
	none      bool   // the last reading found nothing
	failed    string // why the last reading was none
}

// see says whether what a reading found is to be published. A reading that failed is no news of the host,
// and one that found nothing is believed once the next one agrees: without an endpoint nobody can call this
// node.
func (w *hostWatch) see(es []mesh.Endpoint, err error) bool {
	if err != nil {
		return false
	}
	first := len(es) == 0 && !w.none
	w.none = len(es) == 0
	return !first && !slices.Equal(es, w.published)
}

// turned says whether a reading failed otherwise than the one before, or is the first that did not.
func (w *hostWatch) turned(err error) bool {
	text := ""
	if err != nil {
		text = err.Error()
	}
	was := w.failed
	w.failed = text
	return text != was
}

// watchHost publishes what read finds, as it changes, until ctx ends.
func (w *hostWatch) watchHost(ctx context.Context, read func() ([]mesh.Endpoint, error), publish func(...mesh.Endpoint) error, log *slog.Logger) error {
	for {
		es, err := read()
		switch turned := w.turned(err); {
		case turned && err != nil:
			log.Warn("the host's addresses cannot be read: the endpoints stay as they are", "endpoints", w.published, "err", err)
		case turned:
			log.Info("the host's addresses can be read again")
		}
		if w.see(es, err) {
			if err := publish(es...); err != nil {
				log.Warn("the host's new addresses are not published", "err", err)
			} else {
				log.Info("the host has other addresses", "endpoints", es)
				w.published = es
			}
		}
		if !relay.Sleep(ctx, lookAgain) {
			return nil
		}
	}
}
