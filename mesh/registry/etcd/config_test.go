package etcd_test

import (
	"bytes"
	"context"
	"encoding/gob"
	"encoding/json"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/warren-mesh/warren/mesh/registry/etcd"
)

func TestNewRefuses(t *testing.T) {
	ok := []string{"http://127.0.0.1:1"}
	for _, test := range []struct {
		cfg  etcd.Config
		want string
	}{
		{etcd.Config{}, "etcd: Endpoints is empty, at least one is needed"},
		{etcd.Config{Endpoints: []string{""}}, `etcd: Endpoints[0]: "" is not host:port, with or without http:// or https://`},
		{etcd.Config{Endpoints: []string{"host"}}, `etcd: Endpoints[0]: "host" is not host:port, with or without http:// or https://`},
		{etcd.Config{Endpoints: []string{"http://host:0"}}, `etcd: Endpoints[0]: the port of "http://host:0" is not a number from 1 to 65535`},
		{etcd.Config{Endpoints: []string{"ftp://host:1"}}, `etcd: Endpoints[0]: the scheme of "ftp://host:1" is neither http nor https`},
		{etcd.Config{Endpoints: []string{"http://u:p@host:1"}}, `etcd: Endpoints[0]: "http://u:p@host:1" is not host:port, with or without http:// or https://`},
		{etcd.Config{Endpoints: []string{"http://a:1", "https://b:1"}}, `etcd: Endpoints[1]: "https://b:1": http and https cannot be mixed`},
		{etcd.Config{Endpoints: ok, TLS: etcd.TLS{CAFile: "ca"}}, `etcd: TLS is set, but Endpoints[0] is http: "http://127.0.0.1:1"`},
		{etcd.Config{Endpoints: []string{"a:1"}, TLS: etcd.TLS{CertFile: "cert"}}, `etcd: TLS.CertFile is "cert" and TLS.KeyFile is "", both or neither are needed`},
		{etcd.Config{Endpoints: ok, Password: "hush"}, "etcd: Password is set, but Username is not"},
		{etcd.Config{Endpoints: ok, PasswordFile: "file"}, `etcd: PasswordFile is "file", but Username is not set`},
		{etcd.Config{Endpoints: ok, Username: "u", Password: "hush", PasswordFile: "file"}, `etcd: Password and PasswordFile ("file") are both set, one is enough`},
		{etcd.Config{Endpoints: ok, Username: "u"}, `etcd: Username is "u", but neither Password nor PasswordFile is set`},
		{etcd.Config{Endpoints: ok, Timeout: time.Millisecond}, "etcd: Timeout is 1ms, at least 100ms are needed"},
		{etcd.Config{Endpoints: ok, Timeout: -time.Second}, "etcd: Timeout is -1s, at least 100ms are needed"},
	} {
		if _, err := etcd.New(test.cfg); err == nil || err.Error() != test.want {
			t.Errorf("%+v: %v, want %s", test.cfg, err, test.want)
		}
	}
}

func TestParseURL(t *testing.T) {
	for _, test := range []struct {
		url  string
		want etcd.Config
		text string // of String, if not url
	}{
		{url: "etcd://127.0.0.1:1", want: etcd.Config{Endpoints: []string{"http://127.0.0.1:1"}}},
		{url: "etcd://127.0.0.1:1/", want: etcd.Config{Endpoints: []string{"http://127.0.0.1:1"}}, text: "etcd://127.0.0.1:1"},
		{url: "etcd://a:1,[::1]:2/x/y/?timeout=2s", want: etcd.Config{Endpoints: []string{"http://a:1", "http://[::1]:2"}, Prefix: "/x/y/", Timeout: 2 * time.Second}},
		{
			url:  "etcds://u:p@a:1/x?ca=%2Fca&cert=c&key=k&password-file=f&server-name=n",
			want: etcd.Config{Endpoints: []string{"https://a:1"}, Prefix: "/x", Username: "u", Password: "p", PasswordFile: "f", TLS: etcd.TLS{CAFile: "/ca", CertFile: "c", KeyFile: "k", ServerName: "n"}},
			text: "etcds://u@a:1/x?ca=%2Fca&cert=c&key=k&password-file=f&server-name=n",
		},
		{
			url:  "etcd://us%3Aer:p%40ss%2F%25:w@a:1",
			want: etcd.Config{Endpoints: []string{"http://a:1"}, Username: "us:er", Password: "p@ss/%:w"},
			text: "etcd://us%3Aer@a:1",
		},
		{url: "etcd://a:1/%3F%40/", want: etcd.Config{Endpoints: []string{"http://a:1"}, Prefix: "/?@/"}},
	} {
		got, err := etcd.ParseURL(test.url)
		if err != nil || !reflect.DeepEqual(got, test.want) {
			t.Errorf("ParseURL(%q) = %#v, %v, want %#v", test.url, got, err, test.want)
		}
		if test.text == "" {
			test.text = test.url
		}
		if s := got.String(); s != test.text {
			t.Errorf("%q is printed as %q, want %q", test.url, s, test.text)
		}
	}
}

const hush = "hush-hush"

func TestParseURLRefuses(t *testing.T) {
	for url, want := range map[string]string{
		"":                               "begins with neither etcd:// nor etcds://",
		"http://u:hush-hush@a:1":         "begins with neither etcd:// nor etcds://",
		"etcd://":                        `the endpoint that begins with "" is not host:port`,
		"etcd://a":                       `the endpoint that begins with "a" is not host:port`,
		"etcd://u:hush-hush":             `the endpoint that begins with "u" is not host:port`,
		"etcd://u:hush-hush@a":           `the endpoint that begins with "a" is not host:port`,
		"etcd://u:hush-hush@a:1,":        `the endpoint that begins with "" is not host:port`,
		"etcd://u:hush-hush/x@a:1":       "'@' after '/' or '?'",
		"etcd://u:hush-hush?x@a:1":       "'@' after '/' or '?'",
		"etcd://u:hush-hush#x@a:1":       "has '#', which is written as %23",
		"etcd://u:hush-hush%@a:1":        "begins no %XX; write '%' as %25",
		"etcd://u:hush-hush@a:1?timout=": `unknown parameter "timout" in the URL, did you mean "timeout"?`,
		"etcds://u:hush-hush@a:1?pasword-file=hush-hush": `unknown parameter "pasword-file" in the URL, did you mean "password-file"?`,
		"etcds://a:1?cacert=x":                           `did you mean "cert"?`,
		"etcds://a:1?servername=x":                       `did you mean "server-name"?`,
		"etcds://a:1?ca=x&ca=y":                          `parameter "ca" is in the URL 2 times`,
		"etcds://a:1?ca=":                                `parameter "ca" of the URL has no value`,
		"etcd://a:1?ca=x":                                `parameter "ca" of the URL needs etcds://`,
		"etcd://a:1?timeout=5":                           `parameter "timeout" of the URL is "5", not a duration such as 5s`,
		"etcd://a:1?a=%":                                 "are not name=value",
	} {
		c, err := etcd.ParseURL(url)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", url, err, want)
		} else if strings.Contains(err.Error(), "hush") {
			t.Errorf("%q: the error tells the password: %v", url, err)
		}
		if !reflect.DeepEqual(c, etcd.Config{}) {
			t.Errorf("%q: an error comes with %v", url, c)
		}
	}
}

func FuzzParseURL(f *testing.F) {
	for _, s := range []string{"etcd://u:p@a:1,[::1]:2/x/y/?timeout=2s", "etcds://a:1?ca=x", "etcd://%41@a:1", "etcd://@a:1//"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		c, err := etcd.ParseURL(s)
		if err != nil {
			return
		}
		// What is printed is read as the same, but for the password.
		again, err := etcd.ParseURL(c.String())
		if err != nil {
			t.Fatalf("%q is printed as %q: %v", s, c, err)
		}
		if c.Password = ""; !reflect.DeepEqual(c, again) {
			t.Fatalf("%q is printed as %q, which is %#v", s, c, again)
		}
	})
}

// Whatever is printed, the password is not.
func TestPasswordIsNeverPrinted(t *testing.T) {
	c := etcd.Config{Endpoints: []string{"http://127.0.0.1:1"}, Username: "u", Password: hush}
	r, err := etcd.New(c)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	type nested struct {
		Config  etcd.Config
		Pointer *etcd.Config
		R       *etcd.Registry
		r       *etcd.Registry
	}
	for _, v := range []any{c, &c, r, []etcd.Config{c}, map[string]etcd.Config{"c": c}, nested{c, &c, r, r}} {
		for _, verb := range "vsdqxXobcteEfgGTU" {
			for _, flags := range []string{"", "+", "#", " ", "0", "+#"} {
				s := fmt.Sprintf("%"+flags+string(verb), v)
				if strings.Contains(s, hush) || strings.Contains(strings.ToLower(s), fmt.Sprintf("%x", hush)) {
					t.Errorf("%%%s%c of %T: %s", flags, verb, v, s)
				}
			}
		}
		var out bytes.Buffer
		for _, h := range []slog.Handler{slog.NewTextHandler(&out, nil), slog.NewJSONHandler(&out, nil)} {
			slog.New(h).LogAttrs(context.Background(), slog.LevelInfo, "x", slog.Any("v", v), slog.Group("g", slog.Any("v", v)))
		}
		if data, err := json.Marshal(v); err == nil {
			out.Write(data)
		}
		_ = gob.NewEncoder(&out).Encode(v)
		if strings.Contains(out.String(), hush) {
			t.Errorf("%T: %s", v, out.String())
		}
	}
}
