package key

import (
	"bytes"
	"encoding/base64"
	"encoding/gob"
	"encoding/hex"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"text/template"
)

// traces returns what betrays the secret in output: every run of six bytes in
// each way that package fmt, an encoder or a dump writes bytes.
func traces(b [Size]byte) []string {
	all := []string{
		base64.StdEncoding.EncodeToString(b[:])[:43],
		base64.URLEncoding.EncodeToString(b[:])[:43],
		string(b[:]),
	}
	const window = 6
	for i := range Size - window {
		w := b[i : i+window]
		all = append(all, string(w), hex.EncodeToString(w), strings.ToUpper(hex.EncodeToString(w)))
		all = append(all, base64.RawStdEncoding.EncodeToString(w), base64.RawURLEncoding.EncodeToString(w))
		all = append(all, strings.Trim(fmt.Sprintf("%q", w), `"`), strings.Trim(fmt.Sprintf("%+q", w), `"`))
		for _, element := range []string{
			"%d", "%x", "%X", "%#x", "%#X", "%02x", "%o", "%#o", "%O", "%b", "%#b", "%U", "%#U", "%c", "%q", "%+q", "%s", "%e", "%t", "%p",
		} {
			for _, separator := range []string{" ", ",", ", ", ":"} {
				var parts []string
				for _, c := range w {
					parts = append(parts, fmt.Sprintf(element, c))
				}
				all = append(all, strings.Join(parts, separator))
			}
		}
	}
	return all
}

// trace returns what of the secret is in out, or "".
func trace(out string, all []string) string {
	for _, s := range all {
		if strings.Contains(out, s) {
			return s
		}
	}
	return ""
}

type exported[K comparable] struct {
	Name string
	Key  K
}

type unexported[K comparable] struct {
	name string
	key  K
}

type deep[K comparable] struct {
	Outer  *unexported[K]
	inner  unexported[K]
	list   []K
	keys   map[K]string
	values map[string]K
	any    any
	array  [1]K
	ptr    *K
	fn     func() K
	ch     chan K
}

// shapes returns the key in every place a program can keep it in.
func shapes[K comparable](k K) map[string]any {
	u := unexported[K]{"n", k}
	d := deep[K]{
		&u, u, []K{k}, map[K]string{k: "v"}, map[string]K{"k": k}, k, [1]K{k}, &k, func() K { return k }, nil,
	}
	pp := &k
	return map[string]any{
		"value":                      k,
		"pointer":                    &k,
		"pointer to pointer":         &pp,
		"nil pointer":                (*K)(nil),
		"exported field":             exported[K]{"n", k},
		"pointer to exported field":  &exported[K]{"n", k},
		"unexported field":           u,
		"pointer to unexported":      &u,
		"slice":                      []K{k, k},
		"array":                      [2]K{k, k},
		"pointer to array":           &[2]K{k, k},
		"map value":                  map[string]K{"k": k},
		"map key":                    map[K]bool{k: true},
		"pointer to map":             &map[K]K{k: k},
		"slice of any":               []any{k, &k, u},
		"map of any":                 map[any]any{k: u, u: k},
		"deep":                       d,
		"pointer to deep":            &d,
		"reflect.Value":              reflect.ValueOf(k),
		"reflect.Value of unexp.":    reflect.ValueOf(u).Field(1),
		"error":                      fmt.Errorf("cannot use %v: %w", u, errors.New("why")),
		"struct with embedded key":   struct{ exported[K] }{exported[K]{"n", k}},
		"slog.Value":                 slog.AnyValue(k),
		"slog.Attr":                  slog.Any("k", u),
		"slog.Group":                 slog.Group("g", "k", k, "u", u),
		"anonymous unexported array": struct{ a [1]K }{[1]K{k}},
	}
}

// writers returns every way out that a program may send a value by mistake.
func writers() map[string]func(io.Writer, any) {
	all := map[string]func(io.Writer, any){
		"Print":   func(w io.Writer, v any) { fmt.Fprint(w, v) },
		"Println": func(w io.Writer, v any) { fmt.Fprintln(w, v) },
		"Errorf w": func(w io.Writer, v any) {
			format := "%w" // not constant: vet would rightly complain
			fmt.Fprint(w, fmt.Errorf(format, v))
		},
		"log":   func(w io.Writer, v any) { log.New(w, "", 0).Print(v) },
		"panic": func(_ io.Writer, v any) { panic(v) },
		"json":  func(w io.Writer, v any) { report(w, json.NewEncoder(w).Encode(v)) },
		"xml":   func(w io.Writer, v any) { report(w, xml.NewEncoder(w).Encode(v)) },
		"gob":   func(w io.Writer, v any) { report(w, gob.NewEncoder(w).Encode(v)) },
		"template": func(w io.Writer, v any) {
			report(w, template.Must(template.New("").Parse("{{.}} {{printf \"%x\" .}}")).Execute(w, v))
		},
		"slog text": func(w io.Writer, v any) {
			l := slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{AddSource: true}))
			l.With("with", v).WithGroup("g").Info("m", "any", v, slog.Group("in", "any", v))
			l.Error("m", "err", fmt.Errorf("%v", v))
		},
		"slog json": func(w io.Writer, v any) {
			l := slog.New(slog.NewJSONHandler(w, nil))
			l.With("with", v).WithGroup("g").Info("m", "any", v, slog.Group("in", "any", v))
		},
		"reflection": func(w io.Writer, v any) { dump(w, reflect.ValueOf(v), 0) },
	}
	for _, verb := range "vTtbcdoOqxXUeEfFgGspw!zk" {
		for _, flags := range []string{"", "+", "#", " ", "0", "-", "50", ".3", "+#", "# ", "+#050.20", "[1]"} {
			format := "%" + flags + string(verb)
			all[format] = func(w io.Writer, v any) { fmt.Fprintf(w, format, v) }
		}
	}
	return all
}

// written returns what write makes of v, and the text of its panic if it does:
// some of these ways are not for all values.
func written(write func(io.Writer, any), v any) string {
	var out bytes.Buffer
	func() {
		defer func() {
			if r := recover(); r != nil {
				fmt.Fprintln(&out, r)
			}
		}()
		write(&out, v)
	}()
	return out.String()
}

func report(w io.Writer, err error) {
	if err != nil {
		fmt.Fprintln(w, err)
	}
}

// dump follows everything reflection can, unexported fields and pointers too,
// as the printers of debuggers and test libraries do.
func dump(w io.Writer, v reflect.Value, depth int) {
	if depth > 12 {
		return
	}
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() {
			dump(w, v.Elem(), depth+1)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			dump(w, v.Field(i), depth+1)
		}
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			dump(w, v.Index(i), depth+1)
		}
	case reflect.Map:
		for i := v.MapRange(); i.Next(); {
			dump(w, i.Key(), depth+1)
			dump(w, i.Value(), depth+1)
		}
	case reflect.String:
		fmt.Fprintf(w, "%s %q %x ", v.String(), v.String(), v.String())
	case reflect.Uint8:
		fmt.Fprintf(w, "%d ", v.Uint())
	}
}

func TestRule22SecretKeysNeverPrint(t *testing.T) {
	k := fixed()
	psk, err := PresharedFromBytes([]byte(strings.Repeat("\xa5\x5b\xc7\x91", 8)))
	if err != nil {
		t.Fatal(err)
	}
	test := func(t *testing.T, secret [Size]byte, shapes map[string]any) {
		all := traces(secret)
		for where, v := range shapes {
			for how, write := range writers() {
				out := written(write, v)
				if s := trace(out, all); s != "" {
					t.Errorf("%s, written with %s, shows %q of the key:\n%s", where, how, s, out)
				}
			}
		}
	}
	t.Run("private", func(t *testing.T) { test(t, k.Bytes(), shapes(k)) })
	t.Run("preshared", func(t *testing.T) { test(t, psk.Bytes(), shapes(psk)) })
}

// A test that finds nothing must be able to find something.
func TestRule22PlainArrayIsFound(t *testing.T) {
	secret := fixed().Bytes()
	all := traces(secret)
	seen := func(how string, v any) bool {
		return trace(written(writers()[how], v), all) != ""
	}
	for _, how := range []string{
		"Print", "Println", "log", "panic", "slog text", "template", "reflection",
		"%v", "%+v", "%#v", "%d", "%x", "%X", "%#x", "%o", "%O", "%b", "%q", "%c", "%U", "%s", "%t", "%e", "%p",
	} {
		if !seen(how, unexported[[Size]byte]{"n", secret}) {
			t.Errorf("an array in an unexported field, written with %s, was not found", how)
		}
	}
	for _, how := range []string{"json", "xml", "gob", "slog json"} {
		if !seen(how, exported[string]{"n", base64.StdEncoding.EncodeToString(secret[:])}) {
			t.Errorf("base64 in an exported field, written with %s, was not found", how)
		}
	}
}

func TestRule22WhatIsPrintedInstead(t *testing.T) {
	k := fixed()
	psk, err := PresharedFromBytes([]byte(strings.Repeat("x", Size)))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		v    any
		want string
	}{
		{k, "(private key)"},
		{Private{}, "(no private key)"},
		{psk, "(preshared key)"},
		{Preshared{}, "(no preshared key)"},
	} {
		for _, format := range []string{"%v", "%+v", "%#v", "%s", "%x", "%X", "%q", "%d"} {
			if got := fmt.Sprintf(format, c.v); got != c.want {
				t.Errorf("%s: got %q, want %q", format, got, c.want)
			}
			if got := fmt.Sprintf(format, []any{c.v}); !strings.Contains(got, c.want) {
				t.Errorf("%s in a slice: got %q, want it to contain %q", format, got, c.want)
			}
		}
		if got := c.v.(fmt.Stringer).String(); got != c.want {
			t.Errorf("String: got %q, want %q", got, c.want)
		}
		if got := c.v.(fmt.GoStringer).GoString(); got != c.want {
			t.Errorf("GoString: got %q, want %q", got, c.want)
		}
		if got := c.v.(slog.LogValuer).LogValue().String(); got != c.want {
			t.Errorf("LogValue: got %q, want %q", got, c.want)
		}
	}
}

func TestRule22MarshallingASecretFails(t *testing.T) {
	psk, err := NewPreshared()
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range []any{
		fixed(), psk,
		exported[Private]{"n", fixed()}, exported[Preshared]{"n", psk},
		map[Private]int{fixed(): 1}, map[Preshared]int{psk: 1},
	} {
		if b, err := json.Marshal(v); err == nil {
			t.Errorf("json.Marshal(%T) gave %s, want an error", v, b)
		}
	}
	b, err := json.Marshal([]any{exported[Private]{}, exported[Preshared]{}, map[Private]int{{}: 1}})
	if want := `[{"Name":"","Key":""},{"Name":"","Key":""},{"":1}]`; err != nil || string(b) != want {
		t.Errorf("json.Marshal of zero keys: %s, %v, want %s", b, err, want)
	}
	type optional struct {
		Key Private `json:",omitzero"`
	}
	if b, err := json.Marshal(optional{}); err != nil || string(b) != "{}" {
		t.Errorf("json.Marshal of an omitted zero key: %s, %v, want {}", b, err)
	}
}
