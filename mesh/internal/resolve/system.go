package resolve

import (
	"context"
	"net"
	"net/netip"
	"time"
)

const fallbackTTL = time.Minute // of answers that come without one

// System looks names up as the host does.
func System() Lookup { return fallback }

// fallback asks the resolver of the standard library, which tells no TTL.
func fallback(ctx context.Context, host string) ([]netip.Addr, time.Duration, error) {
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	return addrs, fallbackTTL, err
}
