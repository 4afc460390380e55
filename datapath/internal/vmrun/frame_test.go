package main

import (
	"bytes"
	"errors"
	"io"
	"testing"
)

func TestFrames(t *testing.T) {
	var b bytes.Buffer
	f := &frames{w: &b}
	for _, s := range []string{"one", "", "three"} {
		if err := f.send(frameOut, []byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	whole := bytes.Clone(b.Bytes())
	for _, want := range []string{"one", "", "three"} {
		if kind, data, err := readFrame(&b); kind != frameOut || string(data) != want || err != nil {
			t.Errorf("%c %q, %v", kind, data, err)
		}
	}
	if _, _, err := readFrame(&b); err != io.EOF {
		t.Error(err)
	}
	if _, _, err := readFrame(bytes.NewReader(whole[:7])); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
	if _, _, err := readFrame(bytes.NewReader([]byte("o\xff\xff\xff\xff"))); err == nil {
		t.Error("4 GiB are taken")
	}
}
