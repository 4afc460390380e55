package config

import (
	"strconv"
	"strings"
	"testing"

	"github.com/warren-mesh/warren/datapath/kernel"
)

// What the settings of an interface of the host take is what its datapaths take, so that nothing is found out late.
func TestKernelAgrees(t *testing.T) {
	refuses := func(o kernel.Options, why string) bool {
		k, err := kernel.New(o) // which changes nothing
		if err == nil {
			_ = k.Close()
			return false
		}
		return strings.Contains(err.Error(), why)
	}
	for _, name := range []string{"warren0", "a", "a.b-c_d", "é", "fifteen-bytes-1", "sixteen-bytes-12", "日本語日本語", ".", "..", "...", "lo", "all", "default",
		"a/b", "a b", "a\tb", "a:b", "a%b", "a\x7fb", "a\u00a0b", "a\u0085b", "a\xffb", "-a"} {
		if err := setInterface(new(Config), name); (err != nil) != refuses(kernel.Options{Interface: name}, "not a name for an interface") {
			t.Errorf("interface %q: the setting says %v, the datapath otherwise", name, err)
		}
	}
	for _, n := range []int{1, 50, 252, 253, 254, 255, 256, 1<<32 - 4, 1<<32 - 3, 1<<32 - 2, 1<<32 - 1, 1 << 32, 4, 5, 32763, 32764, -1} {
		text := strconv.Itoa(n)
		if err := setTable(new(Config), text); (err != nil) != refuses(kernel.Options{Table: n}, "routing table "+text+":") {
			t.Errorf("table %d: the setting says %v, the datapath otherwise", n, err)
		}
		if err := setMetric(new(Config), text); (err != nil) != refuses(kernel.Options{Metric: n}, "metric "+text+":") {
			t.Errorf("metric %d: the setting says %v, the datapath otherwise", n, err)
		}
		if err := setPriority(new(Config), text); (err != nil) != refuses(kernel.Options{Routing: kernel.RoutingPolicy, Priority: n}, "rule priority "+text+":") {
			t.Errorf("priority %d: the setting says %v, the datapath otherwise", n, err)
		}
		if err := setProtocol(new(Config), text); (err != nil) != refuses(kernel.Options{Protocol: n}, "route protocol "+text+":") {
			t.Errorf("protocol %d: the setting says %v, the datapath otherwise", n, err)
		}
	}
	for _, m := range []struct {
		text       string
		mark, mask uint32
	}{{"0x50/0xf0", 0x50, 0xf0}, {"1", 1, 0}, {"1", 1, 1<<32 - 1}, {"0x50/0xf", 0x50, 0xf}, {"0/1", 0, 1}, {"0x51/0x50", 0x51, 0x50}, {"4294967295", 1<<32 - 1, 0}} {
		if err := setMark(new(Config), m.text); (err != nil) != refuses(kernel.Options{Routing: kernel.RoutingPolicy, Mark: m.mark, Mask: m.mask}, "mark ") {
			t.Errorf("mark %s: the setting says %v, the datapath otherwise", m.text, err)
		}
	}
}
