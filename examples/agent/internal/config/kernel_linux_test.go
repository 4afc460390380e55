package config

import (
	"strconv"
	"strings"
	"testing"

	"github.com/warren-mesh/warren/datapath/kernel"
)

// What the settings of the kernel datapath take is what the datapath takes, so that nothing is found out late.
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
	for _, n := range []int{1, 50, 252, 253, 254, 255, 256, 1<<32 - 2, 1<<32 - 1, 1 << 32, -1} {
		text := strconv.Itoa(n)
		if err := setTable(new(Config), text); (err != nil) != refuses(kernel.Options{Table: n}, "routing table "+text+":") {
			t.Errorf("table %d: the setting says %v, the datapath otherwise", n, err)
		}
		if err := setMetric(new(Config), text); (err != nil) != refuses(kernel.Options{Metric: n}, "metric "+text+":") {
			t.Errorf("metric %d: the setting says %v, the datapath otherwise", n, err)
		}
	}
}
