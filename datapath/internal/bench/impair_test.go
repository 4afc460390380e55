package main

import (
	"encoding/binary"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.zx2c4.com/wireguard/conn"
)

// sink is a Bind that remembers what was sent, and when.
type sink struct {
	conn.Bind
	mu   sync.Mutex
	sent []uint32
	at   []time.Time
}

func (s *sink) Open(uint16) ([]conn.ReceiveFunc, uint16, error) { return nil, 1, nil }
func (s *sink) Close() error                                    { return nil }
func (s *sink) BatchSize() int                                  { return 8 }
func (s *sink) Send(bufs [][]byte, _ conn.Endpoint) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range bufs {
		s.sent, s.at = append(s.sent, binary.LittleEndian.Uint32(b[4:])), append(s.at, time.Now())
	}
	return nil
}

func packet(kind byte, n int) []byte {
	return binary.LittleEndian.AppendUint32([]byte{kind, 0, 0, 0}, uint32(n))
}

func open(t *testing.T, delay time.Duration, loss float64, seed uint64) (*impaired, *sink) {
	t.Helper()
	s := &sink{}
	i := newImpaired(s, delay, loss, seed)
	if _, _, err := i.Open(0); err != nil {
		t.Fatal(err)
	}
	return i, s
}

func TestDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const delay = 40 * time.Millisecond
		i, s := open(t, delay, 0, 1)
		start := time.Now()
		b := packet(4, 0)
		for n := range 100 {
			binary.LittleEndian.PutUint32(b[4:], uint32(n)) // the buffer is the caller's again after Send
			if err := i.Send([][]byte{b}, nil); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Millisecond)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if len(s.sent) != 100 {
			t.Fatalf("%d packets, want 100", len(s.sent))
		}
		for n := range s.sent {
			took := s.at[n].Sub(start) - time.Duration(n)*time.Millisecond
			if s.sent[n] != uint32(n) || took < delay-time.Millisecond || took > delay+time.Millisecond {
				t.Errorf("place %d has packet %d, after %v", n, s.sent[n], took)
			}
		}
		i.Send([][]byte{b}, nil)
		i.Close()
		time.Sleep(time.Second)
		synctest.Wait()
		if len(s.sent) != 100 {
			t.Error("a packet left after Close")
		}
	})
}

func TestLoss(t *testing.T) {
	run := func(seed uint64) (data, handshakes []uint32) {
		synctest.Test(t, func(t *testing.T) {
			i, s := open(t, time.Millisecond, 0.1, seed)
			defer i.Close()
			for n := range 5000 {
				i.Send([][]byte{packet(4, n), packet(1, n+10000)}, nil)
			}
			time.Sleep(time.Second)
			synctest.Wait()
			for _, n := range s.sent {
				if n >= 10000 {
					handshakes = append(handshakes, n)
				} else {
					data = append(data, n)
				}
			}
		})
		return data, handshakes
	}
	data, handshakes := run(7)
	if len(handshakes) != 5000 {
		t.Errorf("%d handshakes of 5000 arrived", len(handshakes))
	}
	if len(data) < 4350 || len(data) > 4650 {
		t.Errorf("%d of 5000 arrived with 10 %% of loss", len(data))
	}
	again, _ := run(7)
	other, _ := run(8)
	if len(again) != len(data) || again[len(again)/2] != data[len(data)/2] {
		t.Error("the same seed loses others")
	}
	if len(other) == len(data) && other[len(other)/2] == data[len(data)/2] {
		t.Error("another seed loses the same")
	}
}
