package kernel

import (
	"context"
	"errors"
	"time"

	"github.com/warren-mesh/warren/datapath"
)

const (
	// pollEvery is how often the device is read for what Linux does not report.
	pollEvery = time.Second
	// pollShare bounds the part of the time that this takes: one in so many.
	pollShare = 20
)

// Changed implements datapath.Notifier. Changes of the host that Apply made may be reported too. Close
// does not close the channel.
func (k *Kernel) Changed() <-chan struct{} { return k.changed }

func (k *Kernel) notify() {
	select {
	case k.changed <- struct{}{}:
	default:
	}
}

// watch hands on what hostnet sees, and looks for what nobody reports.
func (k *Kernel) watch() {
	t := time.NewTimer(pollEvery)
	defer t.Stop()
	for {
		select {
		case <-k.done:
			return
		case _, open := <-k.host.Changed():
			if !open {
				return
			}
			k.notify()
		case <-t.C:
			t.Reset(k.poll())
		}
	}
}

// poll reads the device, reports what somebody else changed, and returns when to look again.
func (k *Kernel) poll() time.Duration {
	k.op.Lock()
	defer k.op.Unlock()
	next := max(pollEvery, pollShare*k.took)
	if k.closed || k.model == nil {
		return next
	}
	if k.nobody.index != 0 && time.Since(k.nobody.used) >= keepNobody {
		k.dismiss()
	}
	if age := time.Since(k.seen); age < next/2 && len(k.waiting) == 0 {
		return next - age
	}
	ctx, cancel := context.WithTimeout(context.Background(), replyTimeout)
	defer cancel()
	_, same, err := k.compare(ctx, k.index)
	if err == nil && !same || errors.Is(err, datapath.ErrNoDevice) {
		k.notify()
	}
	if err == nil {
		k.regreet(time.Now())
	}
	return max(pollEvery, pollShare*k.took)
}
