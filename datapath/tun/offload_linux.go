package tun

import "github.com/warren-mesh/warren/datapath"

// fellBack is what to do once Linux refuses packets that are handed to it together; nil: they never are.
func (t *TUN) fellBack() func(error) {
	if t.opts.NoOffload {
		return nil
	}
	return func(err error) {
		t.log.Warn("Linux refused packets that were handed to it together, and is given them one by one from now on", "interface", t.opts.Interface, "reason", err)
		t.notify()
	}
}

// problems is what an operator may want to know of a link.
func (l *link) problems() []datapath.Problem {
	if !l.Alone() {
		return nil
	}
	return []datapath.Problem{{
		Subject: "offload",
		Message: "Linux refused packets that were handed to it together, and is given them one by one: none is lost, but it costs throughput",
		Remedy:  "run another version of Linux; a program that embeds the mesh may set NoOffload, with which packets are never handed over together",
	}}
}
