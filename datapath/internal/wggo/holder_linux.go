package wggo

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// portHolder returns which process has a UDP port, "" where that cannot be known: the process may
// be another user's, or in another PID namespace.
//
// The format of these files is in proc_pid_net(5): the second column is the local address with the
// port in hex after a colon, the tenth the inode of the socket.
func portHolder(port uint16) string {
	inodes := make(map[string]bool)
	for _, name := range []string{"/proc/thread-self/net/udp", "/proc/thread-self/net/udp6"} {
		b, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			if len(f) > 9 && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) {
				inodes["socket:["+f[9]+"]"] = true
			}
		}
	}
	if len(inodes) == 0 {
		return ""
	}
	fds, _ := filepath.Glob("/proc/[0-9]*/fd/[0-9]*")
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && inodes[to] {
			pid := strings.Split(fd, "/")[2]
			comm, _ := os.ReadFile("/proc/" + pid + "/comm")
			return fmt.Sprintf("process %s (%s)", pid, bytes.TrimSpace(comm))
		}
	}
	return ""
}
