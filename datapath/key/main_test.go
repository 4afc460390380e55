package key

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// childEnv makes this test binary one of the processes that a test watches,
// instead of running tests: "OPERATION STEP PATH".
const childEnv = "WARREN_KEY_TEST_CHILD"

func TestMain(m *testing.M) {
	if job := os.Getenv(childEnv); job != "" {
		child(job)
		return
	}
	goleak.VerifyTestMain(m)
}

// child does one operation on a key file and prints how it ended. It waits for
// the end of its input before, and dies, as if the machine had been switched
// off, after the step of that number; the steps start at 1.
func child(job string) {
	operation, rest, _ := strings.Cut(job, " ")
	text, path, _ := strings.Cut(rest, " ")
	last, err := strconv.Atoi(text)
	if err != nil {
		panic(err)
	}
	steps := 0
	f := File{Path: path, step: func(string) {
		if steps++; steps == last {
			p, _ := os.FindProcess(os.Getpid())
			p.Kill()
			select {}
		}
	}}
	io.Copy(io.Discard, os.Stdin)

	var k Private
	var created bool
	switch operation {
	case "load":
		k, err = f.Load()
	case "create":
		k, created, err = f.LoadOrCreate()
	case "replace":
		k = newKey()
		err = f.Replace(k)
	default:
		panic("unknown operation " + operation)
	}
	fmt.Println(k.Public(), created, err)
}

// run returns a command that does child's work, and what it will print.
func run(operation string, step int, path string) (*exec.Cmd, *bytes.Buffer) {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	var out bytes.Buffer
	c := exec.Command(self)
	c.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d %s", childEnv, operation, step, path))
	c.Stdout = &out
	c.Stderr = &out
	return c, &out
}

func newKey() Private {
	k, err := NewPrivate()
	if err != nil {
		panic(err)
	}
	return k
}

// fixed returns a key whose bytes are all different and none of them small, so
// that it is not found in output by chance.
func fixed() Private {
	var b [Size]byte
	for i := range b {
		b[i] = byte(0x68 + 5*i)
	}
	k, err := PrivateFromBytes(b[:])
	if err != nil {
		panic(err)
	}
	return k
}

func asFileError(t *testing.T, err error) *FileError {
	t.Helper()
	var e *FileError
	if !errors.As(err, &e) {
		t.Fatalf("error %v (%T) is no *FileError", err, err)
	}
	return e
}
