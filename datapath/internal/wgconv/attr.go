package wgconv

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
)

// Family and Version name the generic netlink family; the commands are those of its messages.
const (
	Family  = "wireguard"
	Version = 1

	CmdGetDevice = 0
	CmdSetDevice = 1
)

// Attributes of a device, a peer and an allowed IP, and the flags that change what they do.
const (
	deviceIfindex    = 1
	devicePrivateKey = 3
	deviceListenPort = 6
	deviceFwmark     = 7
	devicePeers      = 8

	peerPublicKey    = 1
	peerPresharedKey = 2
	peerFlags        = 3
	peerEndpoint     = 4
	peerKeepalive    = 5
	peerHandshake    = 6
	peerReceived     = 7
	peerSent         = 8
	peerAllowedIPs   = 9

	allowedFamily = 1
	allowedAddr   = 2
	allowedBits   = 3
	allowedFlags  = 4

	peerFlagRemove            = 1
	peerFlagReplaceAllowedIPs = 2
	peerFlagUpdate            = 4

	allowedFlagRemove = 1 // Linux since 6.16
)

// Address families as Linux numbers them, wherever this is compiled.
const (
	afInet  = 2
	afInet6 = 10
)

const (
	attrHeader = 4       // bytes: length and type, 16 bits each
	nested     = 1 << 15 // NLA_F_NESTED
	typeMask   = 1<<14 - 1
)

func align(n int) int { return (n + 3) &^ 3 }

// appendAttr appends one attribute.
func appendAttr(b []byte, typ uint16, data ...byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(attrHeader+len(data)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = append(b, data...)
	return append(b, make([]byte, align(len(data))-len(data))...)
}

func append16(b []byte, typ uint16, v uint16) []byte {
	return appendAttr(b, typ, binary.NativeEndian.AppendUint16(nil, v)...)
}

func append32(b []byte, typ uint16, v uint32) []byte {
	return appendAttr(b, typ, binary.NativeEndian.AppendUint32(nil, v)...)
}

// begin opens an attribute that holds others, and end closes it. Its length has 16 bits.
func begin(b []byte, typ uint16) (_ []byte, at int) {
	return append(b, 0, 0, byteOf(typ|nested, 0), byteOf(typ|nested, 1)), len(b)
}

func byteOf(v uint16, i int) byte {
	var two [2]byte
	binary.NativeEndian.PutUint16(two[:], v)
	return two[i]
}

func end(b []byte, at int) { binary.NativeEndian.PutUint16(b[at:], uint16(len(b)-at)) }

var errSize = errors.New("an attribute of another size than its type has")

// attrs yields the attributes in b. A malformed one ends it, with an error that no value is part of.
func attrs(b []byte) iter.Seq2[attr, error] {
	return func(yield func(attr, error) bool) {
		for len(b) > 0 {
			if len(b) < attrHeader {
				yield(attr{}, fmt.Errorf("%d bytes are left, too few for an attribute", len(b)))
				return
			}
			n := int(binary.NativeEndian.Uint16(b))
			if n < attrHeader || n > len(b) {
				yield(attr{}, fmt.Errorf("an attribute of %d bytes where %d are left", n, len(b)))
				return
			}
			a := attr{binary.NativeEndian.Uint16(b[2:]) & typeMask, b[attrHeader:n]}
			if !yield(a, nil) {
				return
			}
			b = b[min(align(n), len(b)):]
		}
	}
}

type attr struct {
	typ  uint16
	data []byte
}

func (a attr) sized(n int) error {
	if len(a.data) != n {
		return fmt.Errorf("attribute %d: %d bytes, want %d: %w", a.typ, len(a.data), n, errSize)
	}
	return nil
}

func (a attr) uint16() (uint16, error) {
	if err := a.sized(2); err != nil {
		return 0, err
	}
	return binary.NativeEndian.Uint16(a.data), nil
}

func (a attr) uint32() (uint32, error) {
	if err := a.sized(4); err != nil {
		return 0, err
	}
	return binary.NativeEndian.Uint32(a.data), nil
}

func (a attr) uint64() (uint64, error) {
	if err := a.sized(8); err != nil {
		return 0, err
	}
	return binary.NativeEndian.Uint64(a.data), nil
}
