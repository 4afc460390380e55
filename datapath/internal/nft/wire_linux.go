package nft

import (
	"encoding/binary"
	"iter"

	"golang.org/x/sys/unix"
)

// What golang.org/x/sys/unix does not name.
const (
	ofTable               = unix.NFTA_TABLE_NAME // also in what is about something in a table: NFTA_CHAIN_TABLE, NFTA_RULE_TABLE, ...
	tableHandle           = 4                    // NFTA_TABLE_HANDLE, linux/netfilter/nf_tables.h
	tableUserdata         = 6                    // NFTA_TABLE_USERDATA
	chainFlags            = 10                   // NFTA_CHAIN_FLAGS
	chainUserdata         = 12                   // NFTA_CHAIN_USERDATA
	chainBase             = 1                    // NFT_CHAIN_BASE
	udataComment          = 0                    // NFTNL_UDATA_TABLE_COMMENT, libnftnl/udata.h
	tcpFlagsOffset        = 13                   // of the flags in a TCP header
	tcpSYN, tcpRST        = 2, 4                 // linux/tcp.h
	ipv4Dst, ipv6Dst      = 16, 24               // offsets of destination addresses
	accept                = 1                    // NF_ACCEPT, linux/netfilter.h
	prioMangle            = -150                 // NF_IP_PRI_MANGLE
	prioSrcNAT            = 100                  // NF_IP_PRI_NAT_SRC
	loopbackIndex         = 1                    // LOOPBACK_IFINDEX, net/flow.h
	newGen                = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN
	nfgenmsgLen           = 4      // struct nfgenmsg
	mssIPv4, mssIPv6      = 40, 60 // headers of IP and TCP, without options
	inet             byte = unix.NFPROTO_INET
)

var (
	ne = binary.NativeEndian
	be = binary.BigEndian // that of numbers in nftables
)

// request is a message of nfnetlink being written: headers and attributes.
type request []byte

func rawRequest(typ, flags uint16, family byte, resource uint16) request {
	r := make(request, unix.NLMSG_HDRLEN, 256)
	ne.PutUint16(r[4:], typ)
	ne.PutUint16(r[6:], flags|unix.NLM_F_REQUEST)
	return be.AppendUint16(append(r, family, unix.NFNETLINK_V0), resource)
}

// newRequest begins a message of nftables.
func newRequest(typ, flags uint16) request {
	return rawRequest(unix.NFNL_SUBSYS_NFTABLES<<8|typ, flags, inet, 0)
}

func (r request) attr(typ uint16, value []byte) request {
	r = ne.AppendUint16(r, uint16(unix.SizeofNlAttr+len(value)))
	r = append(ne.AppendUint16(r, typ), value...)
	for len(r)%unix.NLMSG_ALIGNTO != 0 {
		r = append(r, 0)
	}
	return r
}

func (r request) u32(typ uint16, v uint32) request { return r.attr(typ, be.AppendUint32(nil, v)) }
func (r request) text(typ uint16, s string) request {
	return r.attr(typ, append([]byte(s), 0))
}

// nest has f write the attributes inside one.
func (r request) nest(typ uint16, f func(request) request) request {
	return r.attr(typ|unix.NLA_F_NESTED, f(nil))
}

// seal gives r its length and number.
func (r request) seal(seq uint32) {
	ne.PutUint32(r[0:], uint32(len(r)))
	ne.PutUint32(r[8:], seq)
}

// message is one that was received.
type message struct {
	typ, flags uint16
	seq, pid   uint32
	body       []byte
}

// messages walks through a datagram. What does not parse ends it.
func messages(b []byte) iter.Seq[message] {
	return func(yield func(message) bool) {
		for len(b) >= unix.NLMSG_HDRLEN {
			n := int(ne.Uint32(b))
			if n < unix.NLMSG_HDRLEN || n > len(b) {
				return
			}
			m := message{ne.Uint16(b[4:]), ne.Uint16(b[6:]), ne.Uint32(b[8:]), ne.Uint32(b[12:]), b[unix.NLMSG_HDRLEN:n]}
			if !yield(m) {
				return
			}
			b = b[min(align(n), len(b)):]
		}
	}
}

func align(n int) int { return (n + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1) }

// each walks through attributes.
func each(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for b := b; len(b) >= unix.SizeofNlAttr; {
			l := int(ne.Uint16(b))
			if l < unix.SizeofNlAttr || l > len(b) {
				return
			}
			typ := ne.Uint16(b[2:]) &^ uint16(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER)
			if !yield(typ, b[unix.SizeofNlAttr:l]) {
				return
			}
			b = b[min(align(l), len(b)):]
		}
	}
}

// attrs are attributes by their type, of which each is there once.
type attrs map[uint16][]byte

func parse(b []byte) attrs {
	as := make(attrs)
	for typ, v := range each(b) {
		as[typ] = v
	}
	return as
}

// object is what a message of nftables is about; it is nil where that is none of the family inet.
func (m message) object() attrs {
	if len(m.body) < nfgenmsgLen || m.body[0] != inet {
		return nil
	}
	return parse(m.body[nfgenmsgLen:])
}

// generation is what a message of type newGen tells.
func (m message) generation() uint32 {
	return parse(m.body[min(nfgenmsgLen, len(m.body)):]).u32(unix.NFTA_GEN_ID)
}

func (as attrs) u32(typ uint16) uint32 {
	if b := as[typ]; len(b) >= 4 {
		return be.Uint32(b)
	}
	return 0
}

func (as attrs) text(typ uint16) string { return text(as[typ]) }

func text(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

// commentOf returns the comment in userdata, which are values with a type and a length of one byte each.
func commentOf(b []byte) string {
	for len(b) >= 2 && len(b) >= 2+int(b[1]) {
		if b[0] == udataComment {
			return text(b[2 : 2+int(b[1])])
		}
		b = b[2+int(b[1]):]
	}
	return ""
}

func withComment(s string) []byte {
	return append(append([]byte{udataComment, byte(len(s) + 1)}, s...), 0)
}
