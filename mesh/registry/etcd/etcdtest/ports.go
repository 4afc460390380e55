package etcdtest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
)

// The ports to choose from are below those that systems take for outgoing connections (Linux: 32768 and
// up; the others higher still), where a port that is free now might be taken when a server comes back.
const firstPort, lastPort = 15000, 32000

// freePorts returns n addresses on loopback on which nobody listens.
func freePorts(t testing.TB, n int) []string {
	t.Helper()
	var found []string
	var held []net.Listener
	defer func() {
		for _, l := range held {
			l.Close()
		}
	}()
	for tries := 0; len(found) < n; tries++ {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", firstPort+rand.IntN(lastPort-firstPort)))
		if err != nil {
			if tries > 1000 {
				t.Fatalf("etcdtest: no port is free: %v", err)
			}
			continue
		}
		held = append(held, l)
		found = append(found, l.Addr().String())
	}
	return found
}
