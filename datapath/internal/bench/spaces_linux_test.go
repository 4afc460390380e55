package main

import (
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath/internal/bench/measure"
)

// What iperf3 says is read as it is meant.
func TestIperf(t *testing.T) {
	tcp := `{"end":{"sum_received":{"bytes":3000,"bits_per_second":8000,"seconds":3}}}`
	r, err := iperf([]byte(tcp), measure.What{Kind: measure.TCP}, time.Second)
	if err != nil || r.Rate != 1000 || r.CPU != 1/4000.*1e9 {
		t.Errorf("TCP: %+v, %v", r, err)
	}
	r, err = iperf([]byte(`{"end":{"sum":{"seconds":2,"packets":100,"lost_packets":40}}}`), measure.What{Kind: measure.UDP}, 0)
	if err != nil || r.Rate != 30 || r.Sent != 50 {
		t.Errorf("UDP: %+v, %v", r, err)
	}
	for _, s := range []string{`{"error":"no route"}`, `{}`, `no JSON`} {
		if _, err := iperf([]byte(s), measure.What{Kind: measure.TCP}, 0); err == nil {
			t.Errorf("%s is a result", s)
		}
	}
}
