package auto

import (
	"context"
	"encoding/json"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
)

// childEnv has this test binary be a program that makes a device with what works, and says what that was.
const childEnv = "WARREN_AUTO_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		child()
	}
	goleak.VerifyTestMain(m)
}

// found is what a child says.
type found struct {
	Chosen, Driver, Instead string
	Device                  bool
	Error                   string
}

func child() {
	var f found
	a, err := New(Options{})
	if err == nil {
		f.Chosen = a.Chosen()
		var k key.Private
		if k, err = key.NewPrivate(); err == nil {
			err = a.Apply(context.Background(), datapath.SetDevice{Device: datapath.Device{Key: k}})
		}
		var s datapath.State
		if err == nil {
			s, err = a.Read(context.Background())
		}
		f.Driver, f.Instead, f.Device = s.Host.Driver, s.Host.Instead, s.Device.Exists()
		a.Close()
	}
	if err != nil {
		f.Error = err.Error()
	}
	_ = json.NewEncoder(os.Stdout).Encode(f)
	os.Exit(0)
}
