// Tunnode is one node with a kernel TUN, as an embedder of the library has it.
package main

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"syscall"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/tun"
	"github.com/warren-mesh/warren/prefixes"
)

func main() {
	name := flag.String("interface", "bench0", "of the device")
	private := flag.String("key", "", "private key")
	addr := flag.String("address", "", "of this node")
	port := flag.Int("port", 51820, "to listen at")
	mtu := flag.Int("mtu", 1420, "of the device")
	peer := flag.String("peer", "", "public key of the other node")
	peerAddr := flag.String("peer-address", "", "of the other node")
	endpoint := flag.String("endpoint", "", "of the other node")
	flag.Parse()
	if err := run(*name, *private, *addr, *port, *mtu, *peer, *peerAddr, *endpoint); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(name, private, addr string, port, mtu int, peer, peerAddr, endpoint string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	k, err := key.ParsePrivate(private)
	if err != nil {
		return err
	}
	p, err := key.ParsePublic(peer)
	if err != nil {
		return err
	}
	d, err := tun.New(tun.Options{Interface: name, Socket: tun.NoSocket})
	if err != nil {
		return err
	}
	defer d.Close()
	there := prefixes.Host(netip.MustParseAddr(peerAddr))
	if err := datapath.Sync(ctx, d, datapath.State{
		Device: datapath.Device{Key: k, ListenPort: uint16(port), MTU: mtu},
		Addrs:  prefixes.Must(prefixes.Host(netip.MustParseAddr(addr))),
		Routes: map[netip.Prefix]netip.Addr{there: {}},
		Peers:  map[key.Public]datapath.Peer{p: {Endpoint: netip.MustParseAddrPort(endpoint), Prefixes: prefixes.Must(there)}},
	}); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}
