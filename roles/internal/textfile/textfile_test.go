package textfile

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestLines(t *testing.T) {
	var got []string
	for n, line := range Lines([]byte("# all\n a \n\n\tb c # d\r\n#\nlast")) {
		got = append(got, fmt.Sprint(n, " ", line))
	}
	if want := "2 a|4 b c|6 last"; strings.Join(got, "|") != want {
		t.Errorf("%q, want %s", got, want)
	}
	for range Lines([]byte("a\nb\n")) {
		break
	}
}

func TestRead(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	for size, ok := range map[int]bool{0: true, Max: true, Max + 1: false} {
		if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
		if b, err := Read(path); (err == nil) != ok || ok && len(b) != size {
			t.Errorf("%d bytes: %d, %v", size, len(b), err)
		}
	}
	for _, p := range []string{dir, path + ".none"} {
		if _, err := Read(p); err == nil || !strings.Contains(err.Error(), p) {
			t.Errorf("%s: %v", p, err)
		}
	}
	if Cut(strings.Repeat("x", 1000)) != strings.Repeat("x", 80) || Cut("x") != "x" {
		t.Error("cut wrongly")
	}
}
