package uapi_test

import (
	"encoding/hex"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/uapi"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

func private(b byte) key.Private {
	k, err := key.PrivateFromBytes([]byte(strings.Repeat(string([]byte{b}), key.Size)))
	if err != nil {
		panic(err)
	}
	return k
}

func psk(b byte) key.Preshared {
	k, err := key.PresharedFromBytes([]byte(strings.Repeat(string([]byte{b}), key.Size)))
	if err != nil {
		panic(err)
	}
	return k
}

func hexOf(b [key.Size]byte) string { return hex.EncodeToString(b[:]) }

func TestDevice(t *testing.T) {
	k := private(7)
	for _, test := range []struct {
		device datapath.Device
		want   string
	}{
		{datapath.Device{}, ""},
		{datapath.Device{MTU: 1420}, ""},
		{datapath.Device{Key: k, ListenPort: 51820, Mark: 7}, "private_key=" + hexOf(k.Bytes()) + "\nfwmark=7\nlisten_port=51820\n"},
	} {
		if got := uapi.Device(test.device); got != test.want {
			t.Errorf("%+v: %q, want %q", test.device, got, test.want)
		}
	}
	if got := uapi.Port(0) + uapi.Port(9) + uapi.Mark(0) + uapi.Mark(8); got != "listen_port=0\nlisten_port=9\nfwmark=0\nfwmark=8\n" {
		t.Errorf("%q", got)
	}
}

func TestPeer(t *testing.T) {
	k := private(7).Public()
	public := "public_key=" + hexOf(k.Bytes()) + "\n"
	none := "preshared_key=" + strings.Repeat("0", 64) + "\n"
	for name, test := range map[string]struct {
		peer    datapath.Peer
		created bool
		want    string
	}{
		"new": {datapath.Peer{}, true, public + "replace_allowed_ips=true\n" + none + "persistent_keepalive_interval=0\n"},
		"new, with all": {datapath.Peer{
			Endpoint: netip.MustParseAddrPort("[::ffff:192.0.2.1]:9"), Preshared: psk(9), Keepalive: 25 * time.Second,
			Prefixes: prefixes.MustParse("10.0.0.0/8", "fd00::/8"),
		}, true, public + "replace_allowed_ips=true\npreshared_key=" + strings.Repeat("09", 32) +
			"\nendpoint=192.0.2.1:9\npersistent_keepalive_interval=25\n" +
			public + "update_only=true\nallowed_ip=10.0.0.0/8\nallowed_ip=fd00::/8\n"},
		"change": {datapath.Peer{Prefixes: prefixes.MustParse("10.0.0.0/8"), Endpoint: netip.MustParseAddrPort("[2001:db8::1]:9")}, false,
			public + "update_only=true\n" + none + "endpoint=[2001:db8::1]:9\npersistent_keepalive_interval=0\nallowed_ip=10.0.0.0/8\n"},
	} {
		got, err := uapi.PutPeer(datapath.PutPeer{Key: k, Peer: test.peer}, test.created)
		if err != nil || got != test.want {
			t.Errorf("%s: %q, %v, want %q", name, got, err, test.want)
		}
	}
	for name, o := range map[string]datapath.PutPeer{
		"no key":          {},
		"half a second":   {Key: k, Peer: datapath.Peer{Keepalive: time.Second / 2}},
		"too long":        {Key: k, Peer: datapath.Peer{Keepalive: 70000 * time.Second}},
		"a second and so": {Key: k, Peer: datapath.Peer{Keepalive: 1500 * time.Millisecond}},
	} {
		if text, err := uapi.PutPeer(o, true); err == nil {
			t.Errorf("%s: %q", name, text)
		}
	}
	if got := uapi.DropPrefixes(datapath.DropPrefixes{Key: k, Prefixes: prefixes.MustParse("10.0.0.0/8", "fd00::/8")}); got != public+"update_only=true\nallowed_ip=-10.0.0.0/8\nallowed_ip=-fd00::/8\n" {
		t.Errorf("%q", got)
	}
	if got := uapi.RemovePeer(k); got != public+"remove=true\n" {
		t.Errorf("%q", got)
	}
}

// get writes a State as a device would.
func get(s datapath.State) string {
	var b strings.Builder
	b.WriteString(uapi.Device(s.Device))
	for k, p := range s.Peers {
		st := s.Stats[k]
		fmt.Fprintf(&b, "public_key=%s\npreshared_key=%s\nprotocol_version=1\n", hexOf(k.Bytes()), hexOf(p.Preshared.Bytes()))
		if p.Endpoint.IsValid() {
			fmt.Fprintf(&b, "endpoint=%v\n", p.Endpoint)
		}
		var sec, nsec int64
		if !st.LastHandshake.IsZero() {
			sec, nsec = st.LastHandshake.Unix(), int64(st.LastHandshake.Nanosecond())
		}
		fmt.Fprintf(&b, "last_handshake_time_sec=%d\nlast_handshake_time_nsec=%d\ntx_bytes=%d\nrx_bytes=%d\npersistent_keepalive_interval=%d\n",
			sec, nsec, st.Sent, st.Received, p.Keepalive/time.Second)
		for q := range p.Prefixes.All() {
			fmt.Fprintf(&b, "allowed_ip=%v\n", q)
		}
	}
	return b.String()
}

func TestParse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := datapath.State{Peers: make(map[key.Public]datapath.Peer), Stats: make(map[key.Public]datapath.Stats)}
		if rapid.Bool().Draw(t, "device") {
			want.Device = datapath.Device{
				Key: private(byte(rapid.IntRange(1, 255).Draw(t, "key"))), ListenPort: rapid.Uint16().Draw(t, "port"), Mark: rapid.Uint32().Draw(t, "mark"),
			}
		}
		shook := make(map[key.Public]time.Time)
		for range rapid.IntRange(0, 4).Draw(t, "peers") {
			k := private(byte(rapid.IntRange(1, 255).Draw(t, "peer"))).Public()
			p := datapath.Peer{Keepalive: time.Duration(rapid.Uint16().Draw(t, "keepalive")) * time.Second}
			if rapid.Bool().Draw(t, "psk") {
				p.Preshared = psk(byte(rapid.IntRange(1, 255).Draw(t, "pskbyte")))
			}
			if rapid.Bool().Draw(t, "endpoint") {
				p.Endpoint = netip.MustParseAddrPort(rapid.SampledFrom([]string{"192.0.2.1:1", "[2001:db8::1]:65535", "[fe80::1%eth0]:9"}).Draw(t, "at"))
			}
			p.Prefixes = prefixes.MustParse(rapid.SliceOf(rapid.SampledFrom([]string{"0.0.0.0/0", "10.0.0.0/8", "::/0", "fd00::1/128"})).Draw(t, "prefixes")...)
			st := datapath.Stats{Received: rapid.Uint64().Draw(t, "rx"), Sent: rapid.Uint64().Draw(t, "tx")}
			if rapid.Bool().Draw(t, "shook") {
				st.LastHandshake = time.Unix(rapid.Int64Range(1, 1<<40).Draw(t, "sec"), rapid.Int64Range(0, 999999999).Draw(t, "nsec"))
				shook[k] = st.LastHandshake
			} else {
				delete(shook, k)
			}
			want.Peers[k], want.Stats[k] = p, st
		}
		text := get(want)
		for _, text := range []string{text, text + "errno=0\n\n", strings.ReplaceAll(text, "\n", "\r\n"), "some_day=1\n" + text} {
			got, err := uapi.Parse(text)
			if err != nil {
				t.Fatal(err)
			}
			if !got.Equal(want) || !maps.Equal(got.Stats, want.Stats) {
				t.Fatalf("%+v, want %+v", got, want)
			}
			if got := uapi.Handshakes(text); !maps.EqualFunc(got, shook, time.Time.Equal) {
				t.Fatalf("handshakes %v, want %v", got, shook)
			}
		}
	})
}

func TestParseErrors(t *testing.T) {
	secret := strings.Repeat("5e", 32)
	k := private(7).Public()
	peer := "public_key=" + hexOf(k.Bytes()) + "\n"
	for _, text := range []string{
		secret, "private_key", "private_key=" + secret + "5e", "private_key=" + secret[1:], "private_key=x" + secret[1:],
		"preshared_key=" + secret, peer + "preshared_key=" + secret[2:], peer + "preshared_key=g" + secret[1:],
		"public_key=" + strings.Repeat("00", 32), "public_key=" + strings.Repeat("ff", 32), peer + peer,
		"listen_port=65536", "listen_port=-1", "fwmark=0x1", "allowed_ip=10.0.0.0/8", peer + "allowed_ip=10.0.0.0/33",
		peer + "allowed_ip=" + secret, peer + "endpoint=" + secret, peer + "endpoint=host:9", peer + "persistent_keepalive_interval=65536",
		peer + "last_handshake_time_nsec=1000000000", peer + "rx_bytes=-1", "errno=22", secret + "=" + secret, "endpoint" + secret + "=1",
	} {
		s, err := uapi.Parse(text)
		if text == secret+"="+secret || text == "endpoint"+secret+"=1" {
			if err != nil && strings.Contains(err.Error(), secret[:8]) {
				t.Errorf("%q: %v", text, err)
			}
			continue
		}
		if err == nil {
			t.Errorf("%q: %+v", text, s)
		} else if strings.Contains(err.Error(), secret[:8]) {
			t.Errorf("%q: the error repeats a secret: %v", text, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(get(datapath.State{Device: datapath.Device{Key: private(1), ListenPort: 1, Mark: 2}, Peers: map[key.Public]datapath.Peer{
		private(2).Public(): {Endpoint: netip.MustParseAddrPort("192.0.2.1:1"), Preshared: psk(3), Prefixes: prefixes.MustParse("10.0.0.0/8")},
	}}))
	f.Add("public_key=\nerrno=1\n")
	f.Add("allowed_ip=::ffff:10.0.0.0/8\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := uapi.Parse(text)
		uapi.Handshakes(text)
		if err != nil {
			for line := range strings.Lines(text) {
				if _, v, ok := strings.Cut(strings.TrimSpace(line), "="); ok && len(v) >= 64 && strings.Contains(err.Error(), v) {
					t.Fatalf("the error repeats %q: %v", v, err)
				}
			}
			return
		}
		again, err := uapi.Parse(get(s))
		if err != nil || !again.Equal(s) {
			t.Fatalf("read %+v, and from its own text %+v, %v", s, again, err)
		}
	})
}

func TestOwnKey(t *testing.T) {
	a, b := private(7), private(9)
	line := func(k key.Private) string { return "private_key=" + hexOf(k.Bytes()) + "\n" }
	for text, want := range map[string]key.Public{
		"": {}, "listen_port=9\n": {}, line(a): a.Public(), "fwmark=1\n" + line(a) + "listen_port=9\n": a.Public(), line(a) + line(b): b.Public(),
		"public_key=" + hexOf(b.Public().Bytes()) + "\n" + line(a): {}, line(a) + "public_key=" + hexOf(b.Public().Bytes()) + "\n": a.Public(),
		"private_key=" + strings.Repeat("0", 64) + "\n": {}, "private_key=x\n": {},
	} {
		if got, ok := uapi.OwnKey(text); got != want || ok != !want.IsZero() {
			t.Errorf("%q: %v, %t, want %v", text, got, ok, want)
		}
	}
}
