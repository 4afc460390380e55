package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-mesh/warren/examples/agent/internal/config"
	"github.com/warren-mesh/warren/examples/agent/internal/control"
	"github.com/warren-mesh/warren/examples/agent/internal/nearest"
)

const about = `Agent makes this host a node of a WireGuard mesh.

Nodes find each other in a registry, an etcd say. Each node runs an agent, which needs no privilege: it
carries the packets in its own process, and other programs use the mesh through its SOCKS5 proxy, or are
reached from the mesh through what it exposes. With the datapath kernel, tun or auto it makes an interface of
the host, and every program of the host uses the mesh; the agent needs CAP_NET_ADMIN for that.`

const aboutExamples = `  # a node: its mesh address, key and endpoints follow by themselves
  agent run --registry etcd://192.0.2.1:2379

  # the whole host in the mesh, by the kernel's WireGuard, or by the best that works here
  sudo agent run --registry etcd://192.0.2.1:2379 --datapath kernel
  sudo agent run --registry etcd://192.0.2.1:2379 --datapath auto

  # publish a web server of this host, and let this host's programs use the mesh
  agent run --registry etcd://192.0.2.1:2379 --expose 80=127.0.0.1:8080 --socks5 127.0.0.1:1080

  # from another node
  agent status
  agent ping alpha
  agent fetch http://alpha/
  curl --proxy socks5h://127.0.0.1:1080 http://alpha/`

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use: "agent", Short: "A node of a WireGuard mesh", Long: about, Example: aboutExamples,
		SilenceErrors: true, SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		err := fmt.Errorf("there is no command %q", args[0])
		var names []string
		for _, c := range cmd.Commands() {
			names = append(names, c.Name())
		}
		if near := nearest.To(args[0], names...); near != "" {
			err = fmt.Errorf("%w, did you mean %q?", err, near)
		}
		return &usageError{err}
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if name, ok := strings.CutPrefix(err.Error(), "unknown flag: --"); ok {
			var names []string
			for _, s := range config.Settings() {
				if cmd.Flags().Lookup(s.Name) != nil {
					names = append(names, s.Name)
				}
			}
			name, _, _ = strings.Cut(name, "=")
			if near := nearest.To(name, names...); near != "" {
				err = fmt.Errorf("%w, did you mean --%s?", err, near)
			}
		}
		return &usageError{err}
	})
	// Flags with long lines of help stay in shape on a terminal.
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), ".FlagUsages ", ".FlagUsagesWrapped 110 "))
	root.AddCommand(newRun(), newStatus(), newPing(), newFetch(), newLeave(), newForget(), newCleanup(), newConfig(), newVersion(),
		&cobra.Command{Use: "settings", Short: "What an agent can be told, and how", Long: settingsHelp()},
		&cobra.Command{Use: "exit-codes", Short: "What the exit status of a command means", Long: exitCodes},
	)
	return root
}

// args has what f does not like be a usageError.
func args(f cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := f(cmd, args); err != nil {
			return &usageError{err}
		}
		return nil
	}
}

// settingsHelp is the help topic that the table of settings makes.
func settingsHelp() string {
	var b strings.Builder
	fmt.Fprintf(&b, `A setting has one name in three spellings: a flag (--log-level), a variable of the environment
(%s) and a key of the YAML file that --config or %s names (log-level). A flag
goes before the environment, that before the file, and that before the default. Paths in the file are
relative to it, be they in the URL of the registry.

Where a setting takes several values, the flag may be given again or have them with commas between, as in
the environment; in the file they are a list. Labels are a map there. "agent config" shows what is in
force and who said so.

What is marked * may change while an agent runs: at SIGHUP it reads its file again, and the files of
certificates and passwords. A registry that is another mesh's is not taken up.
`, config.Variable("log-level"), config.Variable("config"))
	for _, s := range config.Settings() {
		mark := ""
		if s.Reload {
			mark = " *"
		}
		fmt.Fprintf(&b, "\n%s %s%s\n    %s.\n", s.Name, s.Value, mark, wrap(s.Usage, 92, "    "))
		fmt.Fprintf(&b, "    Variable %s. Default: %s.\n", s.Variable(), cmp.Or(s.Default, "none"))
	}
	b.WriteString(`
A file:

    registry: etcds://192.0.2.1:2379,192.0.2.2:2379
    registry-ca: ca.pem
    announce: [10.90.1.0/24]
    expose:
      - 80=127.0.0.1:8080
      - 53/udp=127.0.0.1:53
    label:
      zone: west`)
	return b.String()
}

func wrap(s string, width int, indent string) string {
	var b strings.Builder
	n := 0
	for i, w := range strings.Fields(s) {
		switch {
		case i == 0:
		case n+1+len(w) > width:
			b.WriteString("\n" + indent)
			n = 0
		default:
			b.WriteByte(' ')
			n++
		}
		b.WriteString(w)
		n += len(w)
	}
	return b.String()
}

// socketOf returns where the agent of c listens.
func socketOf(c config.Config) string {
	if c.Socket != "" {
		return c.Socket
	}
	return filepath.Join(c.State, "agent.sock")
}

func clientOf(c config.Config) control.Client { return control.Client{Path: socketOf(c)} }

// notRunning adds to ErrNotRunning what the state folder says.
func notRunning(c config.Config, err error) error {
	if !errors.Is(err, control.ErrNotRunning) {
		return err
	}
	if node := config.Owner(c.State); node != "" {
		return fmt.Errorf("%w; the state folder %s is that of node %s, which \"agent run\" starts", err, c.State, node)
	}
	return fmt.Errorf("%w; start one with \"agent run\", or name its state folder with --state", err)
}

// completeNodes completes the names of peers, as far as a running agent knows them.
func completeNodes(flags *config.Flags) func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		c, err := flags.Load(config.ThisHost())
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), time.Second)
		defer cancel()
		s, err := clientOf(c).Status(ctx)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var names []string
		for _, p := range s.Peers {
			names = append(names, p.Node)
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

func newConfig() *cobra.Command {
	cmd := &cobra.Command{
		Use: "config", Short: "Show the configuration in force, and who said so", Args: args(cobra.NoArgs),
		Long: `Config checks what flags, environment and file say together, and prints what an agent would run with:
YAML that --config takes, with a comment on each setting that says where it comes from. Passwords are
left out.`,
		Example: "  agent config --config agent.yaml",
	}
	flags := config.Bind(cmd.Flags(), config.ToRun)
	choices(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := flags.Load(config.ThisHost())
		if err != nil {
			return err
		}
		return c.Print(cmd.OutOrStdout())
	}
	return cmd
}

// choices completes the flags that take one of a few words.
func choices(cmd *cobra.Command) {
	for name, words := range map[string][]string{
		"datapath": config.Datapaths(), "routing": config.Routings(), "source": config.Sources(), "forward": config.Switches(), "log-level": {"debug", "info", "warn", "error"}, "log-format": {"text", "json"},
	} {
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)) // fails where there is no such flag
	}
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Show which build this is", Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), build())
			return err
		},
	}
}

// build is what the Go toolchain noted of the program.
func build() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "warren, of an unknown build"
	}
	v := "warren " + cmp.Or(info.Main.Version, "(devel)")
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			v += " " + s.Value[:min(len(s.Value), 12)]
		case s.Key == "vcs.modified" && s.Value == "true":
			v += " with changes"
		}
	}
	return v + " " + info.GoVersion
}
