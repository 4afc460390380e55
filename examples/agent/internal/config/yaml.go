package config

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/warren-mesh/warren/examples/agent/internal/nearest"
)

// Of what is no configuration at all, so much is said.
const (
	most     = 20 // lines
	longName = 64 // bytes
)

// maxFile is how many bytes a configuration may have. A file of that size is none.
const maxFile = 1 << 20

// readFile returns what a YAML file sets, and what is wrong with it, each as a line that begins with path
// and line. What is wrong never keeps the rest from being read.
func readFile(path string, read func(string) ([]byte, error)) (map[string][]value, []string) {
	data, err := read(path)
	if err != nil {
		return nil, []string{fmt.Sprintf("the configuration cannot be read: %v", err)}
	}
	return parse(path, data)
}

// syntax is how the parser begins its errors.
var syntax = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

func parse(path string, data []byte) (map[string][]value, []string) {
	if len(data) > maxFile {
		return nil, []string{fmt.Sprintf("%s: has %d bytes, which is no configuration", path, len(data))}
	}
	p := parser{path: path, values: make(map[string][]value)}
	d := yaml.NewDecoder(bytes.NewReader(data))
	var doc, more yaml.Node
	switch err := d.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, nil // nothing, or comments alone
	case err != nil:
		return nil, []string{p.syntax(err)}
	}
	switch err := d.Decode(&more); {
	case errors.Is(err, io.EOF):
	case err != nil:
		return nil, []string{p.syntax(err)}
	default:
		p.bad(&more, "a second document begins; a configuration is one")
	}
	if doc.Kind == yaml.DocumentNode && len(doc.Content) == 1 {
		p.settings(doc.Content[0])
	}
	return p.values, p.problems
}

type parser struct {
	path     string
	values   map[string][]value
	problems []string
}

func (p *parser) syntax(err error) string {
	m := syntax.FindStringSubmatch(err.Error())
	if m == nil || m[1] == "" {
		return fmt.Sprintf("%s: is no YAML: %s", p.path, strings.TrimPrefix(err.Error(), "yaml: "))
	}
	return fmt.Sprintf("%s:%s: is no YAML: %s", p.path, m[1], err.Error()[len(m[0]):])
}

func (p *parser) at(n *yaml.Node) string { return fmt.Sprintf("%s:%d", p.path, n.Line) }

func (p *parser) bad(n *yaml.Node, format string, a ...any) {
	if len(p.problems) == most {
		p.problems = append(p.problems, p.at(n)+": and so on")
	}
	if len(p.problems) > most {
		return
	}
	p.problems = append(p.problems, p.at(n)+": "+fmt.Sprintf(format, a...))
}

// settings reads the map that a configuration is.
func (p *parser) settings(n *yaml.Node) {
	if isNull(n) {
		return
	}
	if n.Kind != yaml.MappingNode {
		p.bad(n, "is %s, where settings such as \"mesh: warren\" belong", kind(n))
		return
	}
	table := make(map[string]Setting)
	var names []string
	for _, s := range Settings() {
		table[s.Name], names = s, append(names, s.Name)
	}
	lines := make(map[string]int)
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		name := k.Value
		s, ok := table[name]
		switch {
		case k.Kind != yaml.ScalarNode:
			p.bad(k, "a key is %s", kind(k))
		case lines[name] > 0:
			p.bad(k, "the key %q is in line %d already", name, lines[name])
		case !ok:
			hint := ""
			if len(name) > longName {
				name = name[:longName] + "..."
			} else if near := nearest.To(strings.ReplaceAll(strings.ToLower(name), "_", "-"), names...); near != "" {
				hint = fmt.Sprintf(", did you mean %q?", near)
			}
			p.bad(k, "unknown key %q%s", name, hint)
		default:
			p.setting(s, k, v)
		}
		if k.Kind == yaml.ScalarNode && lines[name] == 0 {
			lines[name] = k.Line
		}
	}
}

func (p *parser) setting(s Setting, k, v *yaml.Node) {
	if v.Kind == yaml.AliasNode {
		v = v.Alias
	}
	switch {
	case isNull(v):
		p.bad(k, "%s has no value; write one or remove the line", s.Name)
	case v.Kind == yaml.ScalarNode && s.Kind != Pairs:
		p.scalar(s, v)
	case v.Kind == yaml.SequenceNode && s.Kind == List:
		for _, e := range v.Content {
			if e.Kind == yaml.AliasNode {
				e = e.Alias
			}
			if e.Kind != yaml.ScalarNode || isNull(e) {
				p.bad(e, "%s has %s in its list, where %s belongs", s.Name, kind(e), s.Value)
				continue
			}
			p.scalar(s, e)
		}
	case v.Kind == yaml.MappingNode && s.Kind == Pairs:
		lines := make(map[string]int)
		for i := 0; i+1 < len(v.Content); i += 2 {
			k, e := v.Content[i], v.Content[i+1]
			if e.Kind == yaml.AliasNode {
				e = e.Alias
			}
			switch {
			case k.Kind != yaml.ScalarNode || e.Kind != yaml.ScalarNode:
				p.bad(k, "%s has %s where a text belongs", s.Name, kind(e))
			case strings.Contains(k.Value, "="):
				p.bad(k, "%s has the key %q, and no key may have '='", s.Name, k.Value)
			case lines[k.Value] > 0:
				p.bad(k, "%s has the key %q in line %d already", s.Name, k.Value, lines[k.Value])
			default:
				lines[k.Value] = k.Line
				key, ok := p.text(s, k)
				text, ok2 := "", true
				if !isNull(e) {
					text, ok2 = p.text(s, e)
				}
				if ok && ok2 {
					p.values[s.Name] = append(p.values[s.Name], value{key + "=" + text, p.at(k)})
				}
			}
		}
	default:
		p.bad(v, "%s is %s, where %s belongs", s.Name, kind(v), want(s))
	}
}

func (p *parser) scalar(s Setting, n *yaml.Node) {
	if text, ok := p.text(s, n); ok {
		p.values[s.Name] = append(p.values[s.Name], value{text, p.at(n)})
	}
}

// text is what a scalar says, if it says anything.
func (p *parser) text(s Setting, n *yaml.Node) (string, bool) {
	if n.ShortTag() != "!!binary" {
		return n.Value, true
	}
	b, err := base64.StdEncoding.DecodeString(strings.Join(strings.Fields(n.Value), ""))
	if err != nil {
		p.bad(n, "%s is tagged !!binary and is no base64", s.Name)
	}
	return string(b), err == nil
}

func isNull(n *yaml.Node) bool {
	return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null"
}

func kind(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a map"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias"
	}
	if isNull(n) {
		return "nothing"
	}
	return fmt.Sprintf("the text %q", n.Value)
}

func want(s Setting) string {
	switch s.Kind {
	case List:
		return s.Value + " or a list of them"
	case Pairs:
		return "a map of texts"
	}
	return s.Value
}
