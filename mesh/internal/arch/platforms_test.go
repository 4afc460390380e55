package arch

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// A program that embeds the mesh builds for every platform, without a C compiler.
func TestConsumerBuildsEverywhere(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles everything once for each platform: leave out -short")
	}
	ctx := t.Context()
	if end, ok := t.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, end.Add(-15*time.Second))
		defer cancel()
	}
	for _, platform := range []string{"linux/arm64", "darwin/arm64", "windows/amd64", "freebsd/amd64"} {
		t.Run(platform, func(t *testing.T) {
			goos, goarch, _ := strings.Cut(platform, "/")
			cmd := exec.CommandContext(ctx, "go", "build", "-o", os.DevNull, "./examples/quickstart")
			cmd.Dir = root
			cmd.Env = append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0")
			out, err := cmd.CombinedOutput()
			if err != nil && ctx.Err() != nil && os.Getenv("CI") != "true" {
				t.Skip("it takes a minute where nothing is compiled yet, and there is none left: give go test a longer -timeout")
			}
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
