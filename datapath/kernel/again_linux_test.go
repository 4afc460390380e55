package kernel

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
)

// The link deleted 20 times in a row is back each time as it was, and nothing of those before it is left.
func TestDeletedAgain(t *testing.T) {
	n, _ := one(t)
	n.Want.Device.ListenPort = n.Have().Device.ListenPort
	n.Sync()
	want := n.Have()
	used := func() (goroutines, fds int) {
		all, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return runtime.NumGoroutine(), len(all)
	}
	goroutines, fds := used()
	for i := range 20 {
		select {
		case <-n.Changed():
		default:
		}
		n.space.Must(func() error { return netlink.LinkDel(n.link()) })
		nettest.Notified(t, n.Kernel, "a deletion")
		n.mended(fmt.Sprintf("deletion %d", i+1))
		if got := n.Have(); !got.Equal(want) {
			t.Fatalf("deleted %d times, it is\n%+v\nwant\n%+v", i+1, got, want)
		}
	}
	if g, f := used(); g > goroutines+5 || f > fds+5 {
		t.Errorf("%d goroutines and %d files, before %d and %d", g, f, goroutines, fds)
	}
}

// The names of what is made on the way are as different as those of the devices, and Linux takes them.
func TestProbeNames(t *testing.T) {
	of := make(map[string]string)
	for i := range 1000 {
		device := fmt.Sprintf("the-same-fifteen%d", i) // longer than any, or there would not be as many
		name := probeName(device)
		if other, ok := of[name]; ok {
			t.Errorf("%s and %s both have %s", device, other, name)
		}
		of[name] = device
		if err := hostnet.CheckInterface(name); err != nil || !strings.HasPrefix(name, "wrn") {
			t.Errorf("%s has %q: %v", device, name, err)
		}
	}
}
