package roles_test

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
	"github.com/warren-mesh/warren/roles"
)

// gateway is a role that announces a prefix for as long as the node has it.
type gateway struct{ prefix netip.Prefix }

func (gateway) Name() string { return "gateway" }

func (g gateway) Run(ctx context.Context, n roles.Node) error {
	if err := n.Announce(prefixes.Announcement{Prefix: g.prefix}); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// table stands for a mesh.Mesh.
type table struct{ *prefixes.Table }

func (table) Current() (view.View, <-chan struct{}) { return view.View{}, nil }
func (t table) Prefixes() prefixes.Prefixes         { return t.Table }

func Example() {
	mesh := table{prefixes.NewTable()}
	m, err := roles.New(roles.Config{
		Roles:    []roles.Role{gateway{netip.MustParsePrefix("10.0.0.0/8")}},
		Assigned: roles.Static("gateway", "printer"),
		Mesh:     mesh,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	v, newer := m.Current()
	for ; !v.Settled(); v, newer = m.Current() {
		<-newer
	}
	for _, r := range v.Roles {
		fmt.Println(r.Name, "is", r.Phase, r.Waiting)
	}
	stop()
	fmt.Println(<-ended)
	// Output:
	// gateway is healthy []
	// printer is waiting [a program that has this role]
	// <nil>
}
