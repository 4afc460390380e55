package nettest

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// Foreign is a WireGuard device that no datapath made: it is told by hand, with ip and wg.
type Foreign struct {
	T     testing.TB
	Space *Space
	Name  string
	Key   key.Private
	Port  uint16
}

const foreignPort = 40000

// NewForeign makes a device with addresses in a namespace: of the kernel, or of another program if one is
// named that takes the arguments of wireguard-go.
func NewForeign(t testing.TB, s *Space, program string, addrs prefixes.Set) *Foreign {
	t.Helper()
	NeedProgram(t, "ip")
	NeedProgram(t, "wg")
	f := &Foreign{T: t, Space: s, Name: UniqueName(t), Key: NewKey(t), Port: foreignPort}
	if program == "" {
		s.IP("link add " + f.Name + " type wireguard")
	} else {
		s.Start(t, NeedProgram(t, program), "-f", f.Name)
		// Not by asking wg, which removes a socket that nobody listens on yet.
		Within(t, 20*time.Second, program+" listens", func() bool {
			c, err := net.Dial("unix", "/var/run/wireguard/"+f.Name+".sock")
			if err == nil {
				c.Close()
			}
			return err == nil
		})
	}
	f.conf("setconf", fmt.Sprintf("[Interface]\nPrivateKey = %s\nListenPort = %d\n", f.Key.Base64(), f.Port))
	s.IP("link set " + f.Name + " up mtu 1420")
	for a := range addrs.All() {
		s.IP(fmt.Sprintf("addr add %v dev %s%s", a, f.Name, map[bool]string{true: " nodad"}[a.Addr().Is6()]))
	}
	return f
}

func (f *Foreign) conf(command, text string) {
	f.T.Helper()
	if _, err := f.Space.Pipe(text, "wg", command, f.Name, "/dev/stdin"); err != nil {
		f.T.Fatal(err)
	}
}

// Public returns the device's public key.
func (f *Foreign) Public() key.Public { return f.Key.Public() }

// Peer makes the node with a public key a peer of the device, with routes to what it has.
func (f *Foreign) Peer(k key.Public, p datapath.Peer) {
	f.T.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "[Peer]\nPublicKey = %v\nAllowedIPs = %s\n", k, strings.ReplaceAll(fmt.Sprint(p.Prefixes), " ", ", "))
	if !p.Preshared.IsZero() {
		fmt.Fprintf(&b, "PresharedKey = %s\n", p.Preshared.Base64())
	}
	if p.Endpoint.IsValid() {
		fmt.Fprintf(&b, "Endpoint = %v\n", p.Endpoint)
	}
	f.conf("addconf", b.String())
	for q := range p.Prefixes.All() {
		f.Space.IP(fmt.Sprintf("route add %v dev %s", q, f.Name))
	}
}
