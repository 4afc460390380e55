package nft

import (
	"bytes"
	"fmt"
	"iter"
	"maps"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"
	"github.com/warren-mesh/warren/prefixes"
	"golang.org/x/sys/unix"
)

// chain is a chain of packet filtering.
type chain struct {
	name     string
	typ      string
	hook     uint32
	priority int32
	needs    string // what the kernel must have been built with
}

var (
	forward     = chain{"forward", "filter", unix.NF_INET_FORWARD, prioMangle, "CONFIG_NF_TABLES_INET"}
	postrouting = chain{"postrouting", "nat", unix.NF_INET_POST_ROUTING, prioSrcNAT, "CONFIG_NFT_NAT"}
	chains      = []chain{forward, postrouting}
)

// rule is one as the kernel has it.
type rule struct {
	chain string
	exprs []byte // list of expressions, each an attribute
	extra bool   // it has what ours do not: a comment, for instance
}

// wanted is a rule of ours.
type wanted struct {
	rule
	what  string
	needs string
}

// program writes the instructions of a rule.
type program struct {
	b   request
	err error
}

func (p *program) add(es ...expr.Any) {
	for _, e := range es {
		b, err := expr.Marshal(inet, e)
		if err != nil && p.err == nil {
			p.err = err
		}
		p.b = p.b.attr(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, b)
	}
}

// compare has the rule go on where the register that e loads is value, or where it is not.
func (p *program) compare(e expr.Any, op expr.CmpOp, value []byte) {
	p.add(e, &expr.Cmp{Op: op, Register: unix.NFT_REG_1, Data: value})
}

func (p *program) meta(key expr.MetaKey, op expr.CmpOp, value []byte) {
	p.compare(&expr.Meta{Key: key, Register: unix.NFT_REG_1}, op, value)
}

// ifname is the name of an interface as it is compared: whole, with zero bytes behind it.
func ifname(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

func nfproto(is4 bool) []byte {
	if is4 {
		return []byte{unix.NFPROTO_IPV4}
	}
	return []byte{unix.NFPROTO_IPV6}
}

// clamps are the rules that clamp the segments of connections by the MTU of iface.
func clamps(iface string, mtu int) (rs []wanted, err error) {
	for _, side := range []expr.MetaKey{expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME} {
		for _, is4 := range []bool{true, false} {
			var p program
			p.meta(side, expr.CmpOpEq, ifname(iface))
			p.meta(expr.MetaKeyNFPROTO, expr.CmpOpEq, nfproto(is4))
			p.meta(expr.MetaKeyL4PROTO, expr.CmpOpEq, []byte{unix.IPPROTO_TCP})
			p.add(&expr.Payload{DestRegister: unix.NFT_REG_1, Base: expr.PayloadBaseTransportHeader, Offset: tcpFlagsOffset, Len: 1})
			p.compare(&expr.Bitwise{SourceRegister: unix.NFT_REG_1, DestRegister: unix.NFT_REG_1, Len: 1, Mask: []byte{tcpSYN | tcpRST}, Xor: []byte{0}}, expr.CmpOpEq, []byte{tcpSYN})
			headers := mssIPv6
			if is4 {
				headers = mssIPv4
			}
			p.add(&expr.Immediate{Register: unix.NFT_REG_1, Data: be.AppendUint16(nil, uint16(mtu-headers))},
				&expr.Exthdr{SourceRegister: unix.NFT_REG_1, Op: expr.ExthdrOpTcpopt, Type: unix.TCPOPT_MAXSEG, Offset: 2, Len: 2})
			if p.err != nil {
				return nil, p.err
			}
			rs = append(rs, wanted{rule{forward.name, p.b, false}, "add rule for maximum segment size", "CONFIG_NF_TABLES"})
		}
	}
	return rs, nil
}

// snat is the rule that has packets from iface to p get another source address.
func snat(iface string, p netip.Prefix) (wanted, error) {
	var g program
	g.meta(expr.MetaKeyIIFNAME, expr.CmpOpEq, ifname(iface))
	g.meta(expr.MetaKeyOIFNAME, expr.CmpOpNeq, ifname(iface))
	g.meta(expr.MetaKeyOIF, expr.CmpOpNeq, ne.AppendUint32(nil, loopbackIndex))
	g.meta(expr.MetaKeyNFPROTO, expr.CmpOpEq, nfproto(p.Addr().Is4()))
	whole := p.Addr().AsSlice()
	load := &expr.Payload{DestRegister: unix.NFT_REG_1, Base: expr.PayloadBaseNetworkHeader, Offset: dstOffset(p.Addr().Is4()), Len: uint32(len(whole))}
	if n := p.Bits() / 8; n > 0 && p.Bits()%8 == 0 { // whole bytes, of which the others are not looked at
		load.Len = uint32(n)
		g.compare(load, expr.CmpOpEq, whole[:n])
	} else {
		mask := make([]byte, len(whole))
		for i := range p.Bits() {
			mask[i/8] |= 0x80 >> (i % 8)
		}
		g.add(load)
		g.compare(&expr.Bitwise{SourceRegister: unix.NFT_REG_1, DestRegister: unix.NFT_REG_1, Len: load.Len, Mask: mask, Xor: make([]byte, len(whole))}, expr.CmpOpEq, whole)
	}
	g.add(&expr.Masq{})
	return wanted{rule{postrouting.name, g.b, false}, fmt.Sprintf("add rule for %v", p), "CONFIG_NFT_MASQ"}, g.err
}

func dstOffset(is4 bool) uint32 {
	if is4 {
		return ipv4Dst
	}
	return ipv6Dst
}

// write returns the rules of r in their order.
func write(iface string, r Rules) (rs []wanted, err error) {
	if r.ClampMTU != 0 {
		if rs, err = clamps(iface, r.ClampMTU); err != nil {
			return nil, err
		}
	}
	for p := range r.SNAT.All() {
		w, err := snat(iface, p)
		if err != nil {
			return nil, err
		}
		rs = append(rs, w)
	}
	return rs, nil
}

// read returns what rules say that are ours: those that write makes, wherever they are. exact is true where they
// are those of one Rules, in their order, and no others.
func read(iface string, have []rule) (r Rules, exact bool, err error) {
	var snats []netip.Prefix
	for _, h := range have {
		switch h.chain {
		case forward.name:
			if mtu := mtuOf(h); r.ClampMTU == 0 && mtu != 0 {
				ws, err := clamps(iface, mtu)
				if err != nil {
					return Rules{}, false, err
				}
				if slices.ContainsFunc(ws, func(w wanted) bool { return w.same(h) }) {
					r.ClampMTU = mtu
				}
			}
		case postrouting.name:
			if p := destination(h); p.IsValid() {
				w, err := snat(iface, p)
				if err != nil {
					return Rules{}, false, err
				}
				if w.same(h) {
					snats = append(snats, p)
				}
			}
		}
	}
	if r.SNAT, err = prefixes.New(snats...); err != nil {
		return Rules{}, false, err
	}
	want, err := write(iface, r)
	return r, slices.EqualFunc(want, have, wanted.same), err
}

// expressions walks through the instructions of a rule.
func (r rule) expressions() iter.Seq2[string, []byte] {
	return func(yield func(string, []byte) bool) {
		for _, e := range each(r.exprs) {
			as := parse(e)
			if !yield(as.text(unix.NFTA_EXPR_NAME), as[unix.NFTA_EXPR_DATA]) {
				return
			}
		}
	}
}

// mtuOf returns the MTU that h may clamp by; 0: none.
func mtuOf(h rule) (mtu int) {
	headers := 0
	for name, data := range h.expressions() {
		switch name {
		case "cmp":
			var e expr.Cmp
			switch err := expr.Unmarshal(inet, data, &e); {
			case err != nil || headers != 0:
			case bytes.Equal(e.Data, nfproto(true)):
				headers = mssIPv4
			case bytes.Equal(e.Data, nfproto(false)):
				headers = mssIPv6
			}
		case "immediate":
			var e expr.Immediate
			if err := expr.Unmarshal(inet, data, &e); err == nil && len(e.Data) == 2 && headers != 0 {
				mtu = int(be.Uint16(e.Data)) + headers
			}
		}
	}
	if mtu < 68 || mtu > 65535 {
		return 0
	}
	return mtu
}

// destination returns the prefix that h may be about; the zero Prefix: none.
func destination(h rule) (p netip.Prefix) {
	var load expr.Payload
	var mask []byte
	for name, data := range h.expressions() {
		switch name {
		case "payload":
			if expr.Unmarshal(inet, data, &load) != nil {
				return p
			}
		case "bitwise":
			var e expr.Bitwise
			if expr.Unmarshal(inet, data, &e) != nil {
				return p
			}
			mask = e.Mask
		case "cmp":
			var e expr.Cmp
			if load.Len == 0 || expr.Unmarshal(inet, data, &e) != nil || len(e.Data) != int(load.Len) {
				continue
			}
			b := make([]byte, 16)
			copy(b, e.Data)
			n := 8 * len(e.Data)
			if mask != nil {
				n = 0
				for _, m := range mask {
					n += bits.OnesCount8(m)
				}
			}
			if load.Offset == ipv4Dst {
				b = b[:4]
			}
			a, _ := netip.AddrFromSlice(b)
			return netip.PrefixFrom(a, n).Masked()
		}
	}
	return p
}

// same reports whether h is w: whether it has all that w has, and beyond that only what is zero, which
// the kernel adds of its own.
func (w wanted) same(h rule) bool {
	if w.chain != h.chain || h.extra {
		return false
	}
	type expression struct {
		name string
		data attrs
	}
	list := func(r rule) (es []expression) {
		for name, data := range r.expressions() {
			es = append(es, expression{name, parse(data)})
		}
		return es
	}
	return slices.EqualFunc(list(w.rule), list(h), func(a, b expression) bool {
		for typ, v := range a.data {
			if got, ok := b.data[typ]; !ok || !bytes.Equal(v, got) {
				return false
			}
		}
		for typ := range maps.Keys(b.data) {
			if _, ok := a.data[typ]; !ok && !zero(b.data[typ]) {
				return false
			}
		}
		return a.name == b.name
	})
}

func zero(b []byte) bool {
	return !slices.ContainsFunc(b, func(c byte) bool { return c != 0 })
}
