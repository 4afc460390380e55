package arch

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// A program that embeds the mesh builds for every platform, without a C compiler.
func TestConsumerBuildsEverywhere(t *testing.T) {
	if testing.Short() {
		t.Skip("builds everything once for each platform: leave out -short")
	}
	for _, platform := range []string{"linux/amd64", "linux/arm64", "darwin/arm64", "windows/amd64", "freebsd/amd64"} {
		t.Run(platform, func(t *testing.T) {
			goos, goarch, _ := strings.Cut(platform, "/")
			cmd := exec.Command("go", "build", "-o", os.DevNull, "./examples/quickstart")
			cmd.Dir = root
			cmd.Env = append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0")
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
