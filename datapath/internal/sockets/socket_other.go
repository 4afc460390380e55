//go:build !linux

package sockets

import (
	"errors"
	"net"
	"net/netip"

	"golang.zx2c4.com/wireguard/conn"
)

const batchSize = 1

// socket is one of a Bind's.
type socket struct {
	c   *net.UDPConn
	is6 bool
}

// rawEndpoint is nothing here.
type rawEndpoint struct{}

func (*rawEndpoint) init(*Endpoint) {}

func openSocket(network string, port uint16, buffer int) (*socket, error) {
	c, err := net.ListenUDP(network, &net.UDPAddr{Port: int(port)})
	if err != nil {
		return nil, err
	}
	_, _ = c.SetReadBuffer(buffer), c.SetWriteBuffer(buffer)
	return &socket{c: c, is6: network == networks[ipv6]}, nil
}

func (s *socket) close() error {
	if s == nil {
		return nil
	}
	return s.c.Close()
}

func (s *socket) port() uint16 { return uint16(s.c.LocalAddr().(*net.UDPAddr).Port) }

func (s *socket) setMark(mark uint32) error {
	if mark == 0 {
		return nil
	}
	return errors.ErrUnsupported
}

func (s *socket) sizes() (receive, send int) { return 0, 0 }

func (s *socket) send(packets [][]byte, e *Endpoint) (first error) {
	for _, p := range packets {
		_, err := s.c.WriteToUDPAddrPort(p, e.dst)
		if errors.Is(err, net.ErrClosed) {
			return net.ErrClosed
		}
		if first == nil {
			first = err
		}
	}
	return first
}

func (s *socket) receiver() conn.ReceiveFunc {
	r := &receiver{s: s}
	if s.is6 {
		return r.receiveIPv6
	}
	return r.receiveIPv4
}

// receiver is one socket's, for the one goroutine that receives from it.
type receiver struct {
	s     *socket
	known endpoints
}

// wireguard-go's log calls a receive function by its name.
func (r *receiver) receiveIPv4(packets [][]byte, sizes []int, from []conn.Endpoint) (int, error) {
	return r.receive(packets, sizes, from)
}

func (r *receiver) receiveIPv6(packets [][]byte, sizes []int, from []conn.Endpoint) (int, error) {
	return r.receive(packets, sizes, from)
}

func (r *receiver) receive(packets [][]byte, sizes []int, from []conn.Endpoint) (int, error) {
	n, at, err := r.s.c.ReadFromUDPAddrPort(packets[0])
	if errors.Is(err, net.ErrClosed) {
		return 0, net.ErrClosed
	}
	if err != nil {
		return 0, err
	}
	sizes[0], from[0] = n, r.known.get(netip.AddrPortFrom(at.Addr().Unmap(), at.Port()), netip.Addr{}, 0)
	return 1, nil
}
