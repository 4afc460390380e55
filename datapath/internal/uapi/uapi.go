// Package uapi turns datapath's types into the text of WireGuard's cross-platform configuration
// protocol (https://www.wireguard.com/xplatform/), and that text into datapath's types.
//
// It does no I/O and knows no device, so that what is said to a device can be checked without one.
// The text it writes never replaces all peers, and replaces the prefixes of a peer only where the
// peer is new: both would drop packets of sessions that nobody meant to touch.
//
// No error holds a private or preshared key, whatever the text was.
package uapi

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// Device returns the set text that gives a device what is not zero in d. The MTU is no part of the
// protocol. The listen port comes last: it is the one line that fails in practice, and a device stops
// at the line that failed.
func Device(d datapath.Device) string {
	var b builder
	if !d.Key.IsZero() {
		k := d.Key.Bytes()
		b.hex("private_key", k[:])
	}
	if d.Mark != 0 {
		b.uint("fwmark", uint64(d.Mark))
	}
	if d.ListenPort != 0 {
		b.uint("listen_port", uint64(d.ListenPort))
	}
	return b.String()
}

// Port returns the set text that moves a device to another UDP port; 0 has it choose one.
func Port(p uint16) string {
	var b builder
	b.uint("listen_port", uint64(p))
	return b.String()
}

// Mark returns the set text that marks a device's encrypted packets; 0 unmarks them.
func Mark(m uint32) string {
	var b builder
	b.uint("fwmark", uint64(m))
	return b.String()
}

// PutPeer returns the set text of o. created says that the device does not have the peer yet; it then
// comes to run before it is given prefixes, since a device drops the packets for a peer that does not.
// It fails where a device would refuse the keepalive, or would round it.
func PutPeer(o datapath.PutPeer, created bool) (string, error) {
	if o.Key.IsZero() {
		return "", errors.New("a peer with no public key")
	}
	if err := datapath.CheckKeepalive(o.Peer.Keepalive); err != nil {
		return "", err
	}
	var b builder
	b.public(o.Key)
	if created {
		b.line("replace_allowed_ips", "true")
	} else {
		b.line("update_only", "true")
	}
	psk := o.Peer.Preshared.Bytes()
	b.hex("preshared_key", psk[:])
	if o.Peer.Endpoint.IsValid() {
		b.line("endpoint", Unmap(o.Peer.Endpoint).String())
	}
	b.uint("persistent_keepalive_interval", uint64(o.Peer.Keepalive/time.Second))
	if !o.Peer.Prefixes.IsEmpty() {
		if created {
			b.public(o.Key)
			b.line("update_only", "true")
		}
		for p := range o.Peer.Prefixes.All() {
			b.line("allowed_ip", p.String())
		}
	}
	return b.String(), nil
}

// DropPrefixes returns the set text of o. It is that of a device that can take away single prefixes
// (wireguard-go since 2025-05; Linux since 6.16).
func DropPrefixes(o datapath.DropPrefixes) string {
	var b builder
	b.public(o.Key)
	b.line("update_only", "true")
	for p := range o.Prefixes.All() {
		b.line("allowed_ip", "-"+p.String())
	}
	return b.String()
}

// RemovePeer returns the set text that ends peer k.
func RemovePeer(k key.Public) string {
	var b builder
	b.public(k)
	b.line("remove", "true")
	return b.String()
}

// OwnKey returns the public key that a device has once it was told set text; ok is false where the text
// leaves the device the key it has.
func OwnKey(text string) (k key.Public, ok bool) {
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimRight(line, "\r\n"), "=")
		switch name {
		case "private_key":
			b, err := unhex(value)
			if err != nil {
				return key.Public{}, false
			}
			private, err := key.PrivateFromBytes(b)
			if err != nil {
				return key.Public{}, false
			}
			k, ok = private.Public(), true
		case "public_key": // the rest is of peers
			return k, ok
		}
	}
	return k, ok
}

// Unmap returns a with an IPv4-mapped address turned into IPv4: a socket for both families reports
// the peers it hears of so.
func Unmap(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

type builder struct{ strings.Builder }

func (b *builder) line(name, value string) {
	b.WriteString(name)
	b.WriteByte('=')
	b.WriteString(value)
	b.WriteByte('\n')
}
func (b *builder) hex(name string, v []byte)  { b.line(name, hex.EncodeToString(v)) }
func (b *builder) uint(name string, v uint64) { b.line(name, strconv.FormatUint(v, 10)) }
func (b *builder) public(k key.Public)        { v := k.Bytes(); b.hex("public_key", v[:]) }

// Parse reads get text: the answer to "get=1", with or without the closing errno line. Device, Peers
// and Stats of the State are set, both maps always made. Lines it does not know are passed over, as a
// newer device may have some.
//
// Errors name the line by its number and name, never by its value, which may be a key.
func Parse(text string) (datapath.State, error) {
	s := datapath.State{Peers: make(map[key.Public]datapath.Peer), Stats: make(map[key.Public]datapath.Stats)}
	p := parser{state: &s}
	n := 0
	for line := range strings.Lines(text) {
		n++
		line = strings.TrimRight(line, "\r\n")
		if line == "" {
			break
		}
		name, value, ok := strings.Cut(line, "=")
		if !ok {
			return datapath.State{}, fmt.Errorf("line %d: no name=value", n)
		}
		if err := p.line(name, value); err != nil {
			return datapath.State{}, fmt.Errorf("line %d: %s: %w", n, printable(name), err)
		}
	}
	p.finish()
	return s, nil
}

// printable keeps an error from repeating a line that is not what it should be.
func printable(name string) string {
	if len(name) > 32 {
		return "(name of " + strconv.Itoa(len(name)) + " bytes)"
	}
	for _, r := range name {
		if r != '_' && (r < 'a' || r > 'z') {
			return "(no name)"
		}
	}
	return name
}

type parser struct {
	state     *datapath.State
	key       key.Public // of the peer that is being read; zero: still the device
	peer      datapath.Peer
	stats     datapath.Stats
	sec, nsec int64
	prefixes  []netip.Prefix
}

func (p *parser) finish() {
	if p.key.IsZero() {
		return
	}
	p.peer.Prefixes = prefixes.Must(p.prefixes...)
	if p.sec != 0 || p.nsec != 0 {
		p.stats.LastHandshake = time.Unix(p.sec, p.nsec)
	}
	p.state.Peers[p.key], p.state.Stats[p.key] = p.peer, p.stats
	*p = parser{state: p.state}
}

var (
	errSyntax = errors.New("not what the protocol allows")
	errTwice  = errors.New("a peer that was there before")
	errNoPeer = errors.New("comes before any peer")
	errStatus = errors.New("the device reports a failure")
)

func (p *parser) line(name, value string) error {
	switch name {
	case "public_key":
		p.finish()
		b, err := unhex(value)
		if err != nil {
			return err
		}
		k, err := key.PublicFromBytes(b)
		if err != nil {
			return err
		}
		if _, ok := p.state.Peers[k]; ok {
			return errTwice
		}
		p.key = k
		return nil
	case "errno":
		n, err := number(value, 64)
		if err == nil && n != 0 {
			err = fmt.Errorf("%w: errno %d", errStatus, n)
		}
		return err
	case "private_key":
		b, err := unhex(value)
		if err != nil {
			return err
		}
		if string(b) == string(make([]byte, key.Size)) {
			p.state.Device.Key = key.Private{}
			return nil
		}
		p.state.Device.Key, err = key.PrivateFromBytes(b)
		return err
	case "listen_port":
		n, err := number(value, 16)
		p.state.Device.ListenPort = uint16(n)
		return err
	case "fwmark":
		n, err := number(value, 32)
		p.state.Device.Mark = uint32(n)
		return err
	case "preshared_key", "endpoint", "persistent_keepalive_interval", "last_handshake_time_sec",
		"last_handshake_time_nsec", "rx_bytes", "tx_bytes", "allowed_ip":
		if p.key.IsZero() {
			return errNoPeer
		}
		return p.peerLine(name, value)
	}
	return nil
}

func (p *parser) peerLine(name, value string) error {
	switch name {
	case "preshared_key":
		b, err := unhex(value)
		if err != nil {
			return err
		}
		p.peer.Preshared, err = key.PresharedFromBytes(b)
		return err
	case "endpoint":
		a, err := netip.ParseAddrPort(value)
		if err != nil {
			return errSyntax
		}
		p.peer.Endpoint = Unmap(a)
	case "persistent_keepalive_interval":
		n, err := number(value, 16)
		p.peer.Keepalive = time.Duration(n) * time.Second
		return err
	case "last_handshake_time_sec":
		n, err := number(value, 63)
		p.sec = int64(n)
		return err
	case "last_handshake_time_nsec":
		n, err := number(value, 63)
		if err == nil && n >= uint64(time.Second) {
			err = errSyntax
		}
		p.nsec = int64(n)
		return err
	case "rx_bytes":
		n, err := number(value, 64)
		p.stats.Received = n
		return err
	case "tx_bytes":
		n, err := number(value, 64)
		p.stats.Sent = n
		return err
	case "allowed_ip":
		q, err := netip.ParsePrefix(value)
		if err != nil {
			return errSyntax
		}
		c, _, err := prefixes.Canonical(q)
		if err != nil {
			return err
		}
		p.prefixes = append(p.prefixes, c)
	}
	return nil
}

func number(value string, bits int) (uint64, error) {
	n, err := strconv.ParseUint(value, 10, bits)
	if err != nil {
		return 0, errSyntax
	}
	return n, nil
}

func unhex(value string) ([]byte, error) {
	b, err := hex.DecodeString(value)
	if err != nil || len(b) != key.Size {
		return nil, fmt.Errorf("not a key of %d bytes in hex", key.Size)
	}
	return b, nil
}

// Handshakes returns, from get text, when each peer last completed a handshake, without those that
// never did. It is Parse for those who ask for nothing else, and often.
func Handshakes(text string) map[key.Public]time.Time {
	m := make(map[key.Public]time.Time)
	var public string
	var sec int64
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimRight(line, "\r\n"), "=")
		switch name {
		case "public_key":
			public, sec = value, 0
		case "last_handshake_time_sec":
			n, _ := number(value, 63)
			sec = int64(n)
		case "last_handshake_time_nsec":
			nsec, _ := number(value, 63)
			if sec == 0 && nsec == 0 {
				continue
			}
			b, err := unhex(public)
			if err != nil {
				continue
			}
			if k, err := key.PublicFromBytes(b); err == nil {
				m[k] = time.Unix(sec, int64(nsec))
			}
		}
	}
	return m
}
