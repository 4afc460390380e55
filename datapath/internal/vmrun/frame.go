package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"sync"
	"time"
)

// A guest talks to vmrun in frames: a letter, the length of what follows, and that.
const (
	frameHello  = 'h' // the program is about to start: the kernel's release
	frameOut    = 'o' // standard output
	frameErr    = 'e' // standard error
	frameNote   = 'n' // something to tell whoever looks: text
	frameFile   = 'f' // a part of the file that config.Out has at an index: the index, 4 bytes, and data
	frameExit   = 'x' // the program ended: its status, 4 bytes
	frameCannot = 'c' // the program could not be started: text
)

const maxFrame = 1 << 20

// config is what the guest's init is to do.
type config struct {
	Path    string
	Args    []string
	Env     []string
	Dir     string
	Release string
	Date    time.Time
	Modules []string // files, in the order to load them in
	Merge   bool     // standard output and error are one
	Out     []outFile
}

// frames writes frames, from any goroutine.
type frames struct {
	mu sync.Mutex
	w  io.Writer
}

func (f *frames) send(kind byte, data []byte) error {
	b := binary.BigEndian.AppendUint32([]byte{kind}, uint32(len(data)))
	f.mu.Lock()
	defer f.mu.Unlock()
	_, err := f.w.Write(append(b, data...))
	return err
}

// readFrame reads the next frame.
func readFrame(r io.Reader) (kind byte, data []byte, err error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > maxFrame {
		return 0, nil, fmt.Errorf("a frame of %d bytes", n)
	}
	data = make([]byte, n)
	if _, err := io.ReadFull(r, data); err != nil {
		return 0, nil, io.ErrUnexpectedEOF
	}
	return head[0], data, nil
}
