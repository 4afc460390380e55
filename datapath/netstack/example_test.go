package netstack_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/netip"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/prefixes"
)

// Two nodes in one process, one of which serves HTTP to the other. A mesh gives a node its State; here
// it is written by hand.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	var nets [2]*netstack.Net
	var states [2]datapath.State
	for i := range nets {
		n, err := netstack.New(netstack.Options{})
		if err != nil {
			log.Fatal(err)
		}
		defer n.Close()
		k, err := key.NewPrivate()
		if err != nil {
			log.Fatal(err)
		}
		nets[i], states[i] = n, datapath.State{
			Device: datapath.Device{Key: k},
			Addrs:  prefixes.MustParse(fmt.Sprintf("10.0.0.%d", i+1)),
		}
		if err := datapath.Sync(ctx, n, states[i]); err != nil {
			log.Fatal(err)
		}
	}
	for i, n := range nets {
		other := 1 - i
		there, err := nets[other].Read(ctx)
		if err != nil {
			log.Fatal(err)
		}
		states[i].Peers = map[key.Public]datapath.Peer{there.Device.Key.Public(): {
			Endpoint: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), there.Device.ListenPort),
			Prefixes: there.Addrs,
		}}
		states[i].Routes = map[netip.Prefix]netip.Addr{there.Addrs.At(0): {}}
		if err := datapath.Sync(ctx, n, states[i]); err != nil {
			log.Fatal(err)
		}
		n.Settle()
	}

	l, err := nets[1].Listen("tcp", ":80")
	if err != nil {
		log.Fatal(err)
	}
	server := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, "hello from", r.Host)
	})}
	go server.Serve(l)
	defer server.Close()

	client := http.Client{Transport: &http.Transport{DialContext: nets[0].DialContext}}
	defer client.CloseIdleConnections()
	response, err := client.Get("http://10.0.0.2/")
	if err != nil {
		log.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(string(body))
	// Output: hello from 10.0.0.2
}
