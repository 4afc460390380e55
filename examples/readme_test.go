package examples

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/netip"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	devmem "github.com/warren-mesh/warren/datapath/memory"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry/etcd"
	"github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/mesh/view"
)

func Example() {
	device, err := netstack.New(netstack.Options{}) // carries the packets
	must(err)
	m, err := mesh.New(mesh.Config{
		Node:      "alpha",      // an ID of its own
		Registry:  memory.New(), // where nodes find each other
		Datapath:  device,
		Addresses: []netip.Addr{netip.MustParseAddr("10.80.0.1")},
		Announce:  []netip.Prefix{netip.MustParsePrefix("10.90.1.0/24")},
		Endpoints: []mesh.Endpoint{mesh.MustEndpoint("127.0.0.1:0")}, // 0: the device's port
	})
	must(err)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }() // keeps the device right until ctx ends
	must(mesh.Ready(ctx, m))
	v, _ := m.Current()
	fmt.Println(v.Self.Node, "announces", v.Self.Local, "and has", len(v.Peers), "peers")
	stop()
	must(errors.Join(<-ended, device.Close()))
	// Output: alpha announces 10.80.0.1/32 10.90.1.0/24 and has 0 peers
}

func withEtcd() {
	cfg, err := etcd.ParseURL("etcd://127.0.0.1:2379/warren/warren")
	must(err)
	reg, err := etcd.New(cfg) // waits for nothing: an etcd that is away is a condition
	must(err)
	defer reg.Close()
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// The README shows the function above as it is, so what it shows compiles and works.
func TestREADME(t *testing.T) {
	source, err := os.ReadFile("readme_test.go")
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, block, ok := strings.Cut(string(readme), "```go\n")
	block, _, closed := strings.Cut(block, "```\n")
	if !ok || !closed {
		t.Fatal("the README has no block of Go")
	}
	_, function, _ := strings.Cut(string(source), "\nfunc Example() {\n")
	function, _, _ = strings.Cut(function, "\n}\n")
	if want := "func Example() {\n" + function + "\n}\n"; block != want {
		t.Errorf("the README shows\n%s\nand the example is\n%s", block, want)
	}
	_, body, _ := strings.Cut(string(source), "\nfunc withEtcd() {\n")
	body, _, _ = strings.Cut(body, "\n}\n")
	if !strings.Contains(string(readme), "```go\n"+body+"\n```") {
		t.Errorf("the README does not show\n%s", body)
	}
	withEtcd()
}

// The README shows a condition as a line. It is the one that a node has which announces a prefix that
// another, whose ID sorts first, announces too.
func TestREADMECondition(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		store, network := memory.New(), devmem.NewNetwork()
		ended := make(chan error)
		var berlin mesh.Mesh
		for i, name := range []string{"amsterdam", "berlin"} {
			at := netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)})
			m, err := mesh.New(mesh.Config{
				Node:      name,
				Registry:  store,
				Datapath:  devmem.New(devmem.Options{Network: network, Addrs: []netip.Addr{at}}),
				Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 80, 0, byte(i + 1)})},
				Announce:  []netip.Prefix{netip.MustParsePrefix("10.90.0.0/24")},
				Endpoints: []mesh.Endpoint{{Addr: at}},
			})
			if err != nil {
				t.Fatal(err)
			}
			go func() { ended <- m.Run(ctx) }()
			berlin = m
		}
		time.Sleep(time.Minute)
		v, _ := berlin.Current()
		cancel()
		for range 2 {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
		// That amsterdam's claim is not used here is a condition, too.
		var conflicts []string
		for c := range v.Find(view.PrefixConflict) {
			conflicts = append(conflicts, c.String())
		}
		if len(conflicts) != 1 {
			t.Fatalf("conflicts: %q, want one; all conditions: %v", conflicts, v.Conditions)
		}
		if !strings.Contains(string(readme), "\n\n    "+conflicts[0]+"\n\n") {
			t.Errorf("the README does not show the condition as it is:\n\n    %s", conflicts[0])
		}
	})
}
