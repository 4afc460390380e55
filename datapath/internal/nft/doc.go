// Package nft is what a node that forwards has in the packet filter of Linux: one table of nftables, and the
// sysctls without which nothing is forwarded.
//
// The table is of the family inet, and called after the interface of the mesh. As nft lists it:
//
//	table inet warren-mesh0 {
//		comment "warren:mesh0:87; turned on: net.ipv4.ip_forward net.ipv6.conf.all.forwarding"
//
//		chain forward {
//			type filter hook forward priority mangle; policy accept;
//			iifname "mesh0" meta nfproto ipv4 tcp flags syn / syn,rst tcp option maxseg size set 1240
//			iifname "mesh0" meta nfproto ipv6 tcp flags syn / syn,rst tcp option maxseg size set 1220
//			oifname "mesh0" meta nfproto ipv4 tcp flags syn / syn,rst tcp option maxseg size set 1240
//			oifname "mesh0" meta nfproto ipv6 tcp flags syn / syn,rst tcp option maxseg size set 1220
//		}
//
//		chain postrouting {
//			type nat hook postrouting priority srcnat; policy accept;
//			iifname "mesh0" oifname != "mesh0" oif != "lo" ip daddr 10.0.0.0/8 masquerade
//			iifname "mesh0" oifname != "mesh0" oif != "lo" ip6 daddr fd00::/8 masquerade
//		}
//	}
//
// A chain is there only where it has rules, since a nat chain has every connection of the host tracked. Each
// rule says by itself all that it depends on, so that none does more than it should where another one is gone. They
// are the instructions that nft makes of that text: a table saved with nft and restored is the same one.
//
// Linux only ever lowers the maximum segment size of a packet (nft_exthdr_tcp_set_eval in net/netfilter/nft_exthdr.c),
// so one value does for both directions.
//
// # Whose it is
//
// The table is ours if its comment begins with our mark, which it has from the transaction that creates it.
// Everything else is left alone. What the mesh turned on is kept in the same comment, which survives the table's being
// flushed.
//
// # How it is read and written
//
// On sockets of netlink opened once. Linux numbers the generations of its rules. What is read between two equal
// numbers is of one generation; else it is read again, for two seconds at most. Of what others have in tables of their
// own nothing is read, however much it is. What is written names the generation that it was decided
// on, and Linux refuses it in another one; then it is decided again. A table is replaced in one transaction: no
// packet meets half of it, and the connections that it translated before go on, as conntrack remembers them.
//
// It takes Linux 5.10, for comments of tables, and CAP_NET_ADMIN, to read too.
package nft
