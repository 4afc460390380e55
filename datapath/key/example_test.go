package key_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/warren-mesh/warren/datapath/key"
)

func Example() {
	folder, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(folder)
	path := filepath.Join(folder, "private.key")

	first, created, err := key.LoadOrCreate(path)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(first, created)

	again, created, err := key.LoadOrCreate(path)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(again == first, created)
	// Output:
	// (private key) true
	// true false
}

func ExamplePrivate() {
	k, err := key.ParsePrivate("XasIfmJKikt54X+Lg4AO5m87sSkmGLb9HC+LJ/+I4Os=")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(k, k.Public())
	fmt.Printf("%v %x\n", k, k)
	// Output:
	// (private key) 3p7bfXt9wbTTW2HC7OQ1Nz+DQ8hbeGdNrfx+FG+IK08=
	// (private key) (private key)
}

func ExampleParsePublic() {
	p, err := key.ParsePublic("3p7bfXt9wbTTW2HC7OQ1Nz+DQ8hbeGdNrfx+FG+IK08=")
	fmt.Println(p.Short(), err)

	_, err = key.ParsePublic("AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=")
	fmt.Println(err)
	_, err = key.ParsePublic("3p7bfXt9wbTTW2HC7OQ1Nz+DQ8hbeGdNrfx+FG+IK08")
	fmt.Println(err)
	// Output:
	// 3p7bfXt9… <nil>
	// key: public key: a point of low order
	// key: public key: 43 characters long, want 44 of base64
}

func ExamplePublic_MarshalText() {
	p, err := key.ParsePublic("3p7bfXt9wbTTW2HC7OQ1Nz+DQ8hbeGdNrfx+FG+IK08=")
	if err != nil {
		log.Fatal(err)
	}
	text, err := json.Marshal(map[string]key.Public{"peer": p, "nobody": {}})
	fmt.Println(string(text), err)
	// Output: {"nobody":"","peer":"3p7bfXt9wbTTW2HC7OQ1Nz+DQ8hbeGdNrfx+FG+IK08="} <nil>
}

func ExampleFile_LoadOrCreate() {
	folder, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(folder)
	f := key.File{Path: filepath.Join(folder, "private.key"), Logger: slog.Default()}
	if err := os.WriteFile(f.Path, nil, 0o600); err != nil { // as a full disk leaves it
		log.Fatal(err)
	}

	_, _, err = f.LoadOrCreate()
	var fileError *key.FileError
	if errors.Is(err, key.ErrCorrupt) && errors.As(err, &fileError) {
		fmt.Println("cannot", fileError.Op, filepath.Base(fileError.Path))
	}
	// Output: cannot load private.key
}
