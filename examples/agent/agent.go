package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/warren-mesh/warren/datapath/auto"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/examples/agent/internal/config"
	"github.com/warren-mesh/warren/examples/agent/internal/control"
	"github.com/warren-mesh/warren/examples/agent/internal/expose"
	"github.com/warren-mesh/warren/examples/agent/internal/namespace"
	"github.com/warren-mesh/warren/examples/agent/internal/socks5"
	"github.com/warren-mesh/warren/examples/agent/internal/ula"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry"
)

// errState says that a state folder is another's.
var errState = errors.New("not this agent's")

// agent is what "agent run" runs.
type agent struct {
	cfg     config.Config
	reload  func() (config.Config, error) // reads the configuration again
	hup     <-chan os.Signal              // asks for it
	log     *slog.Logger
	level   *slog.LevelVar
	own     []netip.Addr // in the mesh
	store   *guard
	in      *namespace.Namespace // of the interface
	under   *namespace.Namespace // of the UDP sockets
	carrier carrier
	chosen  string // the datapath
	device  device // that it has; zero: none
	mesh    mesh.Mesh
	host    hostWatch
	process control.Process // but for its registry
}

// newAgent makes an agent of its configuration, or refuses it. It changes nothing on the host: that is for
// who has the state folder. close closes what it opens.
func newAgent(cfg config.Config, log *slog.Logger, level *slog.LevelVar) (_ *agent, err error) {
	a := &agent{cfg: cfg, log: log, level: level, own: cfg.Address}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.close())
		}
	}()
	if len(a.own) == 0 {
		a.own = []netip.Addr{ula.Addr(cfg.Mesh, cfg.Node)}
	}
	if err := checkState(cfg); err != nil {
		return nil, err
	}
	s, err := openStore(cfg, log)
	if err != nil {
		return nil, err
	}
	a.store = &guard{store: s, mesh: cfg.Mesh, where: config.RedactURL(cfg.Registry), founds: true,
		open: func(c config.Config) (store, error) { return openStore(c, log) }}
	if err := a.openNamespaces(); err != nil {
		return nil, err
	}
	a.carrier, a.chosen, err = openCarrier(cfg, a.in, a, log)
	if err != nil {
		return nil, err
	}
	if a.chosen != auto.Netstack {
		a.device = deviceOf(cfg)
	}
	endpoints := cfg.Endpoint
	if a.watchesHost() {
		endpoints, err = a.hostEndpoints()
		if a.host.turned(err) {
			log.Warn("the host's addresses cannot be read: no endpoints are published until they can", "err", err)
		}
		a.host.published = endpoints
	}
	wide := cfg.AcceptWide
	var lookup func(ctx context.Context, host string) ([]netip.Addr, time.Duration, error)
	if cfg.Policy() && cfg.NetNS == "" {
		lookup = lookupBesideMesh(cfg.Mark)
	}
	a.mesh, err = mesh.New(mesh.Config{
		Lookup: lookup,
		Node:   cfg.Node, Registry: a.store, Datapath: a.carrier, StateDir: cfg.State,
		Addresses: a.own, Announce: cfg.Announce, Endpoints: endpoints, ListenPorts: cfg.Listen,
		MTU: cfg.MTU, Keepalive: cfg.Keepalive, Roles: cfg.Role, Labels: cfg.Label, Logger: log,
		Accept: func(node string, p netip.Prefix) bool {
			return mesh.AcceptNarrow(node, p) || slices.Contains(wide, p)
		},
	})
	if err != nil {
		return nil, err
	}
	a.process = control.Process{
		PID: os.Getpid(), Build: build(), Started: time.Now().Round(0), Mesh: cfg.Mesh,
		Datapath: cfg.Datapath, State: cfg.State,
	}
	if a.device != (device{}) {
		a.process.Interface, a.process.Namespace, a.process.UnderlayNamespace = cfg.Interface, cfg.NetNS, cfg.UnderlayNetNS
		a.process.Routing, a.process.Table = cfg.Routing, cfg.Table
		if cfg.Policy() {
			a.process.Mark, a.process.Guard = fmt.Sprintf("%#x/%#x", cfg.Mark, cfg.Mask), cfg.Guard
		}
	}
	for _, r := range cfg.Expose {
		a.process.Expose = append(a.process.Expose, r.String())
	}
	return a, nil
}

// openNamespaces opens the network namespaces that are not the agent's own.
func (a *agent) openNamespaces() (err error) {
	if a.in, err = namespace.Open(a.cfg.NetNS); err != nil {
		return fmt.Errorf("netns (%s): %w", a.cfg.Origin("netns"), err)
	}
	name := "netns"
	if a.cfg.UnderlayNetNS != "" {
		name = "underlay-netns"
	}
	if a.under, err = namespace.Open(cmp.Or(a.cfg.UnderlayNetNS, a.cfg.NetNS)); err != nil {
		return fmt.Errorf("%s (%s): %w", name, a.cfg.Origin(name), err)
	}
	return nil
}

func (a *agent) close() error {
	var errs []error
	if a.carrier != nil {
		errs = append(errs, a.carrier.Close())
	}
	if a.store != nil {
		errs = append(errs, a.store.Close())
	}
	return errors.Join(append(errs, a.in.Close(), a.under.Close())...)
}

// run runs the agent until ctx ends or the node leaves the mesh, which both are nil.
func (a *agent) run(asked context.Context) error {
	ctx, stop := context.WithCancelCause(asked)
	defer stop(nil)
	a.store.foreign = func(err error) { stop(err) }

	var all sync.WaitGroup
	// part runs a part of the agent. The end of one is the end of all.
	part := func(name string, f func(context.Context) error) {
		all.Go(func() {
			defer func() {
				if p := recover(); p != nil {
					stop(fmt.Errorf("%s panicked: %v\n%s", name, p, debug.Stack()))
				}
			}()
			if err := f(ctx); err != nil {
				stop(err)
			} else {
				stop(errStopped)
			}
		})
	}
	part("the mesh", a.mesh.Run)
	if a.locked(ctx) {
		if err := a.start(ctx, part); err != nil {
			stop(err)
		}
	}
	<-ctx.Done()
	notify("STOPPING=1")
	all.Wait()
	switch err := context.Cause(ctx); {
	case errors.Is(err, mesh.ErrStateInUse):
		return fmt.Errorf("%w; stop that agent, or name another folder with --state", err)
	case errors.Is(err, mesh.ErrLeft):
		a.log.Info("left the mesh", "node", a.cfg.Node)
		return nil
	case errors.Is(err, errStopped), asked.Err() != nil && err == context.Cause(asked):
		a.log.Info("stopped; the node's record stays, and so does its place in the mesh", "node", a.cfg.Node)
		if text := a.remains(); text != "" {
			a.log.Info(text, "interface", a.device.Name)
		}
		return nil
	default:
		return err
	}
}

// remains says what becomes of the interface when the agent has stopped; "" is nothing to say.
func (a *agent) remains() string {
	switch {
	case a.chosen == auto.Kernel:
		return `the kernel goes on forwarding; "agent leave" or "agent cleanup" ends that`
	case a.chosen == auto.TUN && len(a.cfg.Guard) > 0:
		return `the interface ends with the agent; what is guarded stays unreachable until the agent is back, or "agent cleanup"`
	case a.chosen == auto.TUN:
		return "the interface ends with the agent, and packets for the mesh go by the host's other routes until it is back"
	}
	return ""
}

// errStopped is why parts end that end because they were asked to.
var errStopped = errors.New("stopped")

// locked waits until the mesh has the state folder, and returns whether it came to that.
func (a *agent) locked(ctx context.Context) bool {
	for {
		v, stale := a.mesh.Current()
		if !v.Self.Key.IsZero() {
			return ctx.Err() == nil
		}
		select {
		case <-stale:
		case <-ctx.Done():
			return false
		}
	}
}

// start starts what needs the state folder to be this process's.
func (a *agent) start(ctx context.Context, part func(string, func(context.Context) error)) error {
	others, err := keepState(a.cfg, a.device)
	if err != nil {
		a.log.Error("the state folder does not take note of the mesh", "err", err)
	}
	for _, d := range others {
		left, err := d.left(a.device)
		if err != nil {
			left = []string{"it cannot be told what: " + err.Error()}
		}
		if len(left) > 0 {
			a.log.Warn("an earlier run with other settings may have left what is still in force; stop the agent and run \"agent cleanup\"", "of", d.String(), "left", left)
		}
	}
	l, err := control.Listen(ctx, socketOf(a.cfg))
	if err != nil {
		return err
	}
	var proxy net.Listener
	if a.cfg.Socks5 != "" {
		if proxy, err = net.Listen("tcp", a.cfg.Socks5); err != nil {
			return errors.Join(fmt.Errorf("socks5 (%s): %w", a.cfg.Origin("socks5"), err), l.Close())
		}
		a.process.Socks5 = proxy.Addr().String() // before anybody can ask
	}
	part("the control socket", func(ctx context.Context) error { return control.Serve(ctx, l, a, a.log) })
	if proxy != nil {
		s := &socks5.Server{
			Dialer: a.carrier, Logger: a.log, MaxClients: share(1, socks5.DefaultMaxClients),
			Lookup: a.lookup,
		}
		part("the SOCKS5 proxy", func(ctx context.Context) error { return s.Serve(ctx, proxy) })
		a.log.Info("SOCKS5 proxy into the mesh", "address", a.process.Socks5)
		if host, _, err := net.SplitHostPort(a.process.Socks5); err == nil {
			if ip, err := netip.ParseAddr(host); err == nil && !ip.IsLoopback() {
				a.log.Warn("whoever reaches the SOCKS5 proxy uses the mesh in this node's name, and it does not listen on loopback alone", "address", a.process.Socks5)
			}
		}
	}
	for _, r := range a.cfg.Expose {
		for _, addr := range a.own {
			part("exposing "+r.String(), func(ctx context.Context) error {
				return expose.Serve(ctx, a.carrier, addr, r, expose.Options{Logger: a.log, MaxClients: share(len(a.cfg.Expose)*len(a.own), expose.DefaultMaxClients)})
			})
		}
	}
	if a.watchesHost() {
		part("watching the host's addresses", func(ctx context.Context) error {
			return a.host.watchHost(ctx, a.hostEndpoints, a.mesh.SetEndpoints, a.log)
		})
	}
	if a.hup != nil {
		part("reading the configuration again", a.reloads)
	}
	a.log.Info("running", "node", a.cfg.Node, "mesh", a.cfg.Mesh, "addresses", a.own, "registry", a.store.at(), "datapath", a.chosen, "state", a.cfg.State, "pid", a.process.PID)
	if a.cfg.Registry == "memory" {
		a.log.Warn("the registry is memory: this node is alone in a mesh that ends with it; for others to find it, say --registry etcd://HOST:PORT")
	}
	notify("READY=1")
	return nil
}

func (a *agent) watchesHost() bool { return len(a.cfg.Endpoint) == 0 && !a.cfg.NoEndpoint }

// share returns how many clients, at most most, each of so many parts may have: a quarter of the descriptors
// is for all of them together, so that those who use the mesh leave the agent what it needs for itself.
func share(parts, most int) int {
	n := descriptors()
	if n == 0 {
		return most
	}
	return int(min(max(n/4/uint64(parts), 1), uint64(most)))
}

// reloads takes up at SIGHUP what may change while the agent runs.
func (a *agent) reloads(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.hup:
		}
		c, err := a.reload()
		if err != nil {
			a.log.Error("the configuration is not read again: nothing is changed", "err", err)
			continue
		}
		a.take(ctx, c)
	}
}

func (a *agent) take(ctx context.Context, c config.Config) {
	a.level.Set(c.LogLevel)
	r := c // but for what is in force until the next start
	r.Routing, r.Mark, r.Mask, r.NetNS = a.cfg.Routing, a.cfg.Mark, a.cfg.Mask, a.cfg.NetNS
	switch unseen, err := a.store.reload(ctx, r); {
	case ctx.Err() != nil:
		return
	case err != nil:
		a.log.Error("the registry stays as it is", "registry", a.store.at(), "err", err)
	case unseen != nil:
		a.log.Warn("the registry is taken up without having been seen", "registry", a.store.at(), "err", unseen)
	}
	changed := a.cfg.Changed(c)
	for _, s := range config.Settings() {
		if slices.Contains(changed, s.Name) && !s.Reload {
			a.log.Warn("a setting has changed that is taken up at the next start", "setting", s.Name, "from", c.Origin(s.Name))
		}
	}
	a.log.Info("read the configuration again")
}

// lookup implements inside. It waits a moment for a node that is not known while the registry has not been
// read as a whole.
func (a *agent) lookup(ctx context.Context, host string) (as []netip.Addr, err error) {
	a.settled(ctx, func(v mesh.View) bool {
		as, err = lookup(v, a.own, a.cfg.Mesh, host)
		return err == nil
	})
	return as, err
}

// locate implements inside. It waits as lookup does.
func (a *agent) locate(ctx context.Context, to netip.Addr) (own bool, err error) {
	if slices.Contains(a.own, to) {
		return true, nil
	}
	a.settled(ctx, func(v mesh.View) bool {
		for _, p := range v.Peers {
			if p.Prefixes.HasAddr(to) {
				err = nil
				return true
			}
		}
		err = &netstack.WaitError{Addr: to, Err: netstack.ErrNoRoute}
		return false
	})
	return false, err
}

// settled calls ok with what is known of the mesh, and again with what comes to be known, until it is
// satisfied, all is known that the registry had at first, or a moment is over.
func (a *agent) settled(ctx context.Context, ok func(mesh.View) bool) {
	late := time.NewTimer(lookupTimeout)
	defer late.Stop()
	for {
		v, newer := a.mesh.Current()
		if ok(v) || v.Ready {
			return
		}
		select {
		case <-newer:
		case <-late.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

const lookupTimeout = 5 * time.Second

// Status implements control.Agent.
func (a *agent) Status() (control.Status, <-chan struct{}) {
	v, stale := a.mesh.Current()
	p := a.process
	p.Registry = a.store.at()
	return control.StatusOf(p, v, time.Now()), stale
}

// Leave implements control.Agent.
func (a *agent) Leave(ctx context.Context) error { return a.mesh.Leave(ctx) }

// Forget implements control.Agent.
func (a *agent) Forget(ctx context.Context, node string, force bool) error {
	if err := registry.CheckName(node); err != nil {
		return &control.Error{Code: control.BadRequest, Message: err.Error()}
	}
	if node == a.cfg.Node {
		return &control.Error{Code: control.Refused, Message: fmt.Sprintf("%s is this node; it leaves the mesh with \"agent leave\"", node)}
	}
	v, _ := a.mesh.Current()
	p, ok := v.Peer(node)
	if !ok && !slices.ContainsFunc(v.Conditions, func(c mesh.Condition) bool { return c.Node == node }) && !force {
		return noSuchNode(v, node)
	}
	if s := control.StatusOf(a.process, mesh.View{Peers: []mesh.Peer{p}}, time.Now()).Peers[0]; ok && s.State == control.Up && !force {
		return &control.Error{Code: control.Refused, Message: fmt.Sprintf("%s had a handshake %v ago, so that it seems to be alive, and would put its record back; have it leave, or say --force",
			node, time.Since(p.LastHandshake).Round(time.Second))}
	}
	return a.store.Delete(ctx, registry.NodeID(node))
}

// Ping implements control.Agent.
func (a *agent) Ping(ctx context.Context, to string) (control.Pong, error) {
	as, err := a.lookup(ctx, to)
	if err != nil {
		return control.Pong{}, err
	}
	rtt, err := a.carrier.Ping(ctx, as[0])
	if _, ok := errors.AsType[*control.Error](err); ok {
		return control.Pong{}, err
	}
	if err != nil {
		return control.Pong{}, &control.Error{Code: control.NoAnswer, Message: err.Error()}
	}
	return control.Pong{Addr: as[0], RTT: rtt}, nil
}

// Dial implements control.Agent.
func (a *agent) Dial(ctx context.Context, network, to string) (net.Conn, error) {
	if network != "tcp" {
		return nil, &control.Error{Code: control.BadRequest, Message: fmt.Sprintf("the network %q is not tcp", network)}
	}
	return a.carrier.DialContext(ctx, network, to)
}

// stateFile is what the agent notes in the state folder, beside what the mesh keeps there.
type stateFile struct {
	Version    int      `json:"version"`
	Mesh       string   `json:"mesh"`
	Interfaces []device `json:"interfaces,omitempty"` // that may be on the host, or have left something there
}

const (
	stateName    = "agent.json"
	stateVersion = 2 // in 1, interfaces are names
)

// readState returns what is noted in a state folder. Where nothing is, the error is fs.ErrNotExist.
func readState(dir string) (s stateFile, err error) {
	f := filepath.Join(dir, stateName)
	data, err := os.ReadFile(f)
	if err != nil {
		return s, fmt.Errorf("state folder: %w", err)
	}
	if err := json.Unmarshal(data, &s); err != nil {
		return s, fmt.Errorf("state folder: %s is corrupt: %w; remove it to have it made anew", f, err)
	}
	return s, nil
}

// checkState refuses a state folder that another node, mesh or a newer agent has used. That another
// process uses it now is found out by the mesh.
func checkState(c config.Config) error {
	if was := config.Owner(c.State); was != "" && was != c.Node {
		return fmt.Errorf("state folder %s: is that of node %s, and this is node %s (%s): %w; name a folder of its own with --state, or the node with --node=%s",
			c.State, was, c.Node, c.Origin("node"), errState, was)
	}
	switch s, err := readState(c.State); {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case s.Version > stateVersion:
		return fmt.Errorf("state folder %s: was used by a newer agent (version %d, this one knows %d): %w; run that one, or name another folder with --state", c.State, s.Version, stateVersion, errState)
	case s.Mesh != c.Mesh:
		return fmt.Errorf("state folder %s: is of mesh %s, and this is mesh %s (%s): %w; name a folder of its own with --state, or the mesh with --mesh=%s", c.State, s.Mesh, c.Mesh, c.Origin("mesh"), errState, s.Mesh)
	}
	return nil
}

// keepState notes which mesh the state folder is for, and what cleanup has to look for, now being what this run has.
// It returns what earlier runs had that is of no use to this one.
func keepState(c config.Config, now device) (others []device, err error) {
	was, err := readState(c.State)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, d := range was.Interfaces {
		if d.same(now) {
			continue
		}
		if d.elsewhere() != nil { // a container has a new namespace at each start, and the last one is enough to know of
			others = slices.DeleteFunc(others, func(o device) bool { return o.Name == d.Name && o.Protocol == d.Protocol && o.elsewhere() != nil })
		}
		others = append(others, d)
	}
	s := stateFile{stateVersion, c.Mesh, slices.Clone(others)}
	if now != (device{}) {
		s.Interfaces = append(s.Interfaces, now)
	}
	es, _ := os.ReadDir(c.State)
	for _, e := range es {
		if strings.HasPrefix(e.Name(), "."+stateName+"-") { // of an agent that was killed
			_ = os.Remove(filepath.Join(c.State, e.Name()))
		}
	}
	if reflect.DeepEqual(s, was) {
		return others, nil
	}
	return others, writeState(c.State, s)
}

func writeState(dir string, s stateFile) error {
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, "."+stateName+"-*")
	if err != nil {
		return err
	}
	_, err = f.Write(append(data, '\n'))
	if err = errors.Join(err, inherit(f, dir), f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), filepath.Join(dir, stateName))
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// notify tells systemd, where it asks for it: sd_notify(3).
func notify(state string) {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return
	}
	c, err := net.Dial("unixgram", path)
	if err != nil {
		return // it is a courtesy
	}
	_, _ = c.Write([]byte(state))
	_ = c.Close()
}
