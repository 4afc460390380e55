// Package textfile reads small files that people, or other programs, write for a node.
package textfile

import (
	"fmt"
	"iter"
	"os"
	"strings"
)

// Max is how many bytes a file may have.
const Max = 1 << 20

// Read returns what a file has. It refuses what is no regular file, or has more than Max bytes.
func Read(path string) ([]byte, error) {
	i, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, err
	case !i.Mode().IsRegular():
		return nil, fmt.Errorf("%s: is no regular file", path)
	case i.Size() > Max:
		return nil, fmt.Errorf("%s: has %d bytes, at most %d are read", path, i.Size(), Max)
	}
	return os.ReadFile(path)
}

// Lines yields the lines that have anything in them, with their numbers from 1 on: without comments, which begin with
// "#", and without white space around.
func Lines(data []byte) iter.Seq2[int, string] {
	return func(yield func(int, string) bool) {
		n := 0
		for line := range strings.SplitSeq(string(data), "\n") {
			n++
			line, _, _ = strings.Cut(line, "#")
			if line = strings.TrimSpace(line); line != "" && !yield(n, line) {
				return
			}
		}
	}
}

// Cut returns what of a line is fit for a message.
func Cut(line string) string { return line[:min(len(line), 80)] }
