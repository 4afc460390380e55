package auto

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.zx2c4.com/wireguard/conn"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/kernel"
	"github.com/warren-mesh/warren/datapath/memory"
	"github.com/warren-mesh/warren/prefixes"
)

// fake is a datapath that settles, and is told apart by its name.
type fake struct {
	datapath.Datapath
	name    string
	settled int
	changed chan struct{}
}

func (f *fake) Settle()                  { f.settled++ }
func (f *fake) Changed() <-chan struct{} { return f.changed }
func (f *fake) Read(ctx context.Context) (datapath.State, error) {
	s, err := f.Datapath.Read(ctx)
	s.Host.Driver = ""
	return s, err
}

func TestChoose(t *testing.T) {
	unsupported := fmt.Errorf("a: no module: load it: %w", errors.ErrUnsupported)
	privilege := fmt.Errorf("b: %w: it takes CAP_NET_ADMIN", syscall.EPERM)
	odd := errors.New("the device is upside down")
	for _, test := range []struct {
		what    string
		errs    []error // of a, b, c; nil: it works
		lacks   int     // 1 for a, 2 for b, 4 for c
		chosen  string
		instead string
		err     error // where nothing is chosen
		opened  string
	}{
		{what: "the first works", errs: []error{nil, odd, odd}, chosen: "a", opened: "a"},
		{what: "not supported", errs: []error{unsupported, nil, odd}, chosen: "b", instead: "a: no module: load it", opened: "ab"},
		{what: "no privilege", errs: []error{unsupported, privilege, nil}, chosen: "c", instead: "a: no module: load it; b: it takes CAP_NET_ADMIN", opened: "abc"},
		{what: "no access", errs: []error{&fs.PathError{Op: "open", Path: "/dev/x", Err: syscall.EACCES}, nil, nil}, chosen: "b", instead: "a: open /dev/x: permission denied", opened: "ab"},
		{what: "no such sockets", errs: []error{fmt.Errorf("a: netlink: %w", syscall.EPROTONOSUPPORT), nil, nil}, chosen: "b", instead: "a: netlink: protocol not supported", opened: "ab"},
		{what: "something else is wrong", errs: []error{unsupported, odd, nil}, err: odd, opened: "ab"},
		{what: "in use", errs: []error{fmt.Errorf("a: %w", kernel.ErrInUse), nil, nil}, err: kernel.ErrInUse, opened: "a"},
		{what: "no such namespace", errs: []error{&fs.PathError{Op: "open", Path: "/run/netns/x", Err: syscall.ENOENT}, nil, nil}, err: fs.ErrNotExist, opened: "a"},
		{what: "cannot do what is asked", errs: []error{nil, nil, nil}, lacks: 1, chosen: "b", instead: "a: it cannot do what Options.Thing asks: it is small", opened: "b"},
		{what: "nothing works", errs: []error{unsupported, privilege, unsupported}, err: errors.ErrUnsupported, opened: "abc"},
		{what: "nothing may", errs: []error{privilege, privilege, privilege}, err: syscall.EPERM, opened: "abc"},
		{what: "nothing is left that can", errs: []error{unsupported, privilege, nil}, lacks: 4, err: fs.ErrPermission, opened: "ab"},
		{what: "nothing to try", err: nil},
	} {
		t.Run(test.what, func(t *testing.T) {
			opened := ""
			made := make(map[string]*fake)
			var cs []candidate
			for i, err := range test.errs {
				name := string(rune('a' + i))
				cs = append(cs, candidate{name: name, lacks: []lack{{"Thing", test.lacks>>i&1 != 0, "it is small"}, {"Other", false, "no"}}, open: func() (datapath.Datapath, error) {
					opened += name
					if err != nil {
						return nil, err
					}
					made[name] = &fake{Datapath: memory.New(memory.Options{}), name: name, changed: make(chan struct{})}
					return made[name], nil
				}})
			}
			a, err := choose(cs, slog.New(slog.DiscardHandler))
			if opened != test.opened {
				t.Errorf("opened %q, want %q", opened, test.opened)
			}
			if test.chosen == "" {
				if err == nil || test.err != nil && !errors.Is(err, test.err) {
					t.Fatalf("chosen: %v, error %v, want one that is %v", a, err, test.err)
				}
				for i, e := range test.errs[:len(test.opened)] {
					if name := string(rune('a' + i)); errors.Is(e, test.err) && !errors.Is(err, e) {
						t.Errorf("%v: is not what %s said: %v", err, name, e)
					}
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if a.Chosen() != test.chosen || a.Netstack() != nil {
				t.Errorf("chosen: %s, network stack %v", a.Chosen(), a.Netstack())
			}
			s, err := a.Read(t.Context())
			if err != nil || s.Host.Driver != test.chosen || s.Host.Instead != test.instead {
				t.Errorf("read: driver %q instead of %q, %v; want %q, %q", s.Host.Driver, s.Host.Instead, err, test.chosen, test.instead)
			}
			f := made[test.chosen]
			if a.Changed() != (<-chan struct{})(f.changed) {
				t.Error("the channel of changes is another")
			}
			if a.Settle(); f.settled != 1 {
				t.Errorf("settled %d times", f.settled)
			}
			if err := errors.Join(a.Close(), a.Close()); err != nil {
				t.Error(err)
			}
			if _, err := a.Read(t.Context()); err == nil {
				t.Error("it can be read after Close")
			}
		})
	}
}

// plain is neither a Notifier nor a Settler.
type plain struct{ datapath.Datapath }

func TestChosenThatDoesNotSettle(t *testing.T) {
	a, err := choose([]candidate{{name: "a", open: func() (datapath.Datapath, error) { return plain{memory.New(memory.Options{})}, nil }}}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	a.Settle()
	select {
	case <-a.Changed():
		t.Error("something was changed")
	default:
	}
}

func TestTry(t *testing.T) {
	for _, test := range []struct {
		try  []string
		want string // the names of the candidates, or what the error says
		bad  bool
	}{
		{nil, "kernel tun netstack", false},
		{[]string{}, "kernel tun netstack", false},
		{[]string{Netstack}, "netstack", false},
		{[]string{Netstack, Kernel}, "netstack kernel", false},
		{[]string{"wireguard"}, `"wireguard" is no datapath; there are kernel, tun, netstack`, true},
		{[]string{Kernel, ""}, `"" is no datapath`, true},
		{[]string{TUN, Kernel, TUN}, "tun is there twice", true},
	} {
		cs, err := candidates(Options{Try: test.try})
		if (err != nil) != test.bad || test.bad && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%q: %v, want %s", test.try, err, test.want)
		}
		var names []string
		for _, c := range cs {
			names = append(names, c.name)
		}
		if got := strings.Join(names, " "); !test.bad && got != test.want {
			t.Errorf("%q: %s, want %s", test.try, got, test.want)
		}
		if test.bad {
			if a, err := New(Options{Try: test.try}); err == nil {
				t.Errorf("%q: New chose %s", test.try, a.Chosen())
				a.Close()
			}
		}
	}
}

// filled returns a value that is not zero.
func filled(t testing.TB, of reflect.Type) reflect.Value {
	t.Helper()
	v := reflect.New(of).Elem()
	switch x := v.Addr().Interface().(type) {
	case *prefixes.Set:
		*x = prefixes.MustParse("192.0.2.0/24")
		return v
	case **slog.Logger:
		*x = slog.New(slog.DiscardHandler)
		return v
	case *func() conn.Bind:
		*x = conn.NewDefaultBind
		return v
	case *func(context.Context, string) ([]netip.Addr, error):
		*x = func(context.Context, string) ([]netip.Addr, error) { return nil, nil }
		return v
	}
	switch of.Kind() {
	case reflect.String:
		v.SetString("value")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int:
		v.SetInt(1300)
	case reflect.Uint8, reflect.Uint32:
		v.SetUint(1)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(of, 1, 1))
	default:
		t.Fatalf("there is no value of type %v", of)
	}
	return v
}

// What the datapaths can be told, they are told.
func TestOptionsAreHandedOn(t *testing.T) {
	var o Options
	for i := range reflect.TypeFor[Options]().NumField() {
		f := reflect.ValueOf(&o).Elem().Field(i)
		f.Set(filled(t, f.Type()))
	}
	told := make(map[string]bool)
	for name, to := range map[string]any{Kernel: o.kernel(), TUN: o.tun(), Netstack: o.netstack()} {
		v := reflect.ValueOf(to)
		for i := range v.NumField() {
			f := v.Type().Field(i).Name
			told[f] = true
			from := reflect.ValueOf(o).FieldByName(f)
			switch {
			case !from.IsValid():
				t.Errorf("there is no Options.%s, which %s has", f, name)
			case v.Field(i).IsZero():
				t.Errorf("%s is not told of Options.%s", name, f)
			case v.Field(i).Comparable() && v.Field(i).Interface() != from.Convert(v.Field(i).Type()).Interface():
				t.Errorf("%s is told %v for Options.%s, which is %v", name, v.Field(i), f, from)
			}
		}
	}
	for i := range reflect.TypeFor[Options]().NumField() {
		if f := reflect.TypeFor[Options]().Field(i).Name; !told[f] && f != "Try" {
			t.Errorf("nobody is told of Options.%s", f)
		}
	}
}

// Each option is known to netstack, or a reason not to choose it, or about an interface that it does not have.
func TestOptionsOfNetstack(t *testing.T) {
	passedOver := []string{"Interface", "Table", "Priority", "Mark", "Mask", "Metric", "Protocol", "Cover", "Sources", "Socket", "SocketGroup", "NoOffload"}
	for i := range reflect.TypeFor[Options]().NumField() {
		var o Options
		name := reflect.TypeFor[Options]().Field(i).Name
		f := reflect.ValueOf(&o).Elem().Field(i)
		f.Set(filled(t, f.Type()))
		err := unfit(o.netstackLacks())
		_, known := reflect.TypeOf(o.netstack()).FieldByName(name)
		is := 0
		for _, b := range []bool{known, err != nil, slices.Contains(passedOver, name), name == "Try"} {
			if b {
				is++
			}
		}
		if is != 1 {
			t.Errorf("Options.%s: known to netstack: %t, a reason against it: %v; passed over: %t", name, known, err, slices.Contains(passedOver, name))
		}
		if err != nil && (!notHere(err) || !strings.Contains(err.Error(), "Options."+name)) {
			t.Errorf("Options.%s: %v", name, err)
		}
	}
}

// What netstack cannot do is an error where only it is left.
func TestNewWithoutAnInterface(t *testing.T) {
	for field, o := range map[string]Options{
		"Namespace":         {Namespace: "/proc/self/ns/net"},
		"UnderlayNamespace": {UnderlayNamespace: "/proc/self/ns/net"},
		"Guard":             {Guard: prefixes.MustParse("10.0.0.0/8"), Routing: RoutingPolicy},
		"Routing":           {Routing: RoutingPolicy},
		"SNAT":              {SNAT: prefixes.MustParse("192.0.2.0/24")},
		"Forward":           {Forward: true},
	} {
		o.Try = []string{Netstack}
		a, err := New(o)
		if err == nil {
			a.Close()
		}
		if !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(fmt.Sprint(err), "netstack: ") || !strings.Contains(fmt.Sprint(err), "Options."+field) {
			t.Errorf("Options.%s: %v", field, err)
		}
	}
}

// Input that no datapath can take is an error, even where the one that is chosen would not mind.
func TestNewWithBadInput(t *testing.T) {
	for _, try := range [][]string{nil, {Kernel}, {TUN}, {Netstack}} {
		for _, mtu := range []int{-1, MinMTU - 1, MaxMTU + 1} {
			a, err := New(Options{Try: try, MTU: mtu})
			if err == nil {
				a.Close()
			}
			if err == nil || !strings.Contains(err.Error(), fmt.Sprint("MTU ", mtu)) || errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("%q, MTU %d: %v", try, mtu, err)
			}
		}
	}
}
