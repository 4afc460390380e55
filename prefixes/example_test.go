package prefixes_test

import (
	"encoding/json"
	"fmt"
	"net/netip"

	"github.com/warren-mesh/warren/prefixes"
)

func Example() {
	// Each part of the node announces under its own name.
	table := prefixes.NewTable()
	_, stale := table.Current()

	err := table.Announce("podnetwork",
		prefixes.Announcement{Prefix: netip.MustParsePrefix("10.42.7.0/24"), Source: netip.MustParseAddr("10.42.7.1")},
		prefixes.Announcement{Prefix: netip.MustParsePrefix("10.43.0.9/16"), Source: netip.MustParseAddr("10.42.7.1")},
	)
	fmt.Println("error:", err)
	<-stale // out of date: look again

	now, _ := table.Current()
	for _, a := range now.Announcements {
		fmt.Println(a.Prefix, "from", a.Source)
	}
	for _, p := range now.Problems {
		fmt.Println(p.Source, p.Value, p.Reason)
	}
	// Output:
	// error: <nil>
	// 10.42.7.0/24 from 10.42.7.1
	// 10.43.0.0/16 from 10.42.7.1
	// podnetwork 10.43.0.9/16 has host bits: taken as 10.43.0.0/16
}

func ExampleSet() {
	a := prefixes.MustParse("fd00::/64", "10.0.0.1", "10.1.2.3/8")
	b := prefixes.MustParse("::ffff:10.0.0.0/104", "10.0.0.1/32", "fd00::1/64")
	fmt.Println(a)
	fmt.Println(a == b)
	// Output:
	// 10.0.0.0/8 10.0.0.1/32 fd00::/64
	// true
}

func ExampleNew() {
	// One bad prefix does not cost the others.
	s, err := prefixes.New(
		netip.MustParsePrefix("10.0.0.0/8"),
		netip.MustParsePrefix("::ffff:10.0.0.0/8"),
	)
	fmt.Println(s)
	fmt.Println(err)
	// Output:
	// 10.0.0.0/8
	// prefix "::ffff:10.0.0.0/8": is IPv4-mapped and shorter than /96
}

func ExampleDiff() {
	have := prefixes.MustParse("10.0.0.0/24", "10.0.1.0/24")
	want := prefixes.MustParse("10.0.1.0/24", "10.0.2.0/24")
	added, removed := prefixes.Diff(have, want)
	fmt.Println("add", added, "remove", removed)
	// Output: add 10.0.2.0/24 remove 10.0.0.0/24
}

func ExampleSet_Covers() {
	halves := prefixes.MustParse("10.0.0.0/9", "10.128.0.0/9")
	whole := prefixes.MustParse("10.0.0.0/8")
	fmt.Println(halves.Covers(whole), halves.Has(whole.At(0)))
	// Output: true false
}

func ExampleSet_Lookup() {
	s := prefixes.MustParse("10.0.0.0/8", "10.1.0.0/16")
	fmt.Println(s.Lookup(netip.MustParseAddr("10.1.2.3")))
	fmt.Println(s.Lookup(netip.MustParseAddr("10.2.2.3")))
	// Output:
	// 10.1.0.0/16 true
	// 10.0.0.0/8 true
}

func ExampleSet_MarshalJSON() {
	b, _ := json.Marshal(map[string]prefixes.Set{
		"none": {},
		"some": prefixes.MustParse("fd00::/8", "10.0.0.0/8"),
	})
	fmt.Println(string(b))
	// Output: {"none":[],"some":["10.0.0.0/8","fd00::/8"]}
}
