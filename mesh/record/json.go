package record

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// Marshal returns r as JSON on one line. The same record gives the same bytes, whatever the order of
// its roles. The error is a *FieldError: what Validate says, or that the result is longer than MaxSize.
func Marshal(r Record) ([]byte, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	data := encode(r)
	if len(data) > MaxSize {
		return nil, tooLarge(len(data))
	}
	return data, nil
}

// Parse reads what Marshal wrote, and refuses all else: no field may be missing that is not empty,
// no name may come twice, also in what it otherwise ignores, names count by case, null is not taken for
// empty, numbers are whole, text is UTF-8, nothing may follow, and every limit of this package holds.
// Fields it does not know are ignored. The result passes Validate and Marshal, its roles are sorted, and
// its prefixes canonical. It keeps nothing of data.
//
// The error is a *FieldError. It wraps ErrVersion if the version is newer than Version, whatever else
// there is that this program does not understand.
func Parse(data []byte) (Record, error) {
	r, err := parse(data)
	if err != nil {
		return Record{}, err // not returned as it is: a nil *FieldError would be an error
	}
	return r, nil
}

func parse(data []byte) (Record, *FieldError) {
	if len(data) > MaxSize {
		return Record{}, tooLarge(len(data))
	}
	p := parser{dec: jsontext.NewDecoder(bytes.NewBuffer(data))}
	r, err := p.record()
	if err == nil {
		err = r.check()
	}
	// A canonical form can be longer than what was read: RFC 5952 has 1:2:3:4:5:6:0:8 for
	// 1:2:3:4:5:6::8, and counters are written though they be zero. It is never twice as long, though,
	// in a record that is anywhere near the limit.
	if err == nil && len(data) > MaxSize/2 {
		if n := len(encode(r)); n > MaxSize {
			err = tooLarge(n)
		}
	}
	if err != nil && !errors.Is(err, ErrVersion) {
		if newer := probeVersion(data); newer != nil {
			err = newer
		}
	}
	return r, err
}

func tooLarge(n int) *FieldError {
	return fieldErrorf("", "", "has %d bytes, at most %d are allowed", n, MaxSize)
}

// probeVersion looks at nothing but the version: a newer one may have changed the type of any field
// that comes before it.
func probeVersion(data []byte) *FieldError {
	var probe struct {
		Version int64 `json:"version"`
	}
	if err := json.Unmarshal(data, &probe); err != nil {
		return nil
	}
	if err := checkVersion(probe.Version); err != nil && err.Err != nil {
		return err
	}
	return nil
}

// MarshalJSON writes r as Marshal does, but whatever it is: a status page has to show a record also
// when it is no good. What Marshal would refuse, Parse does.
func (r Record) MarshalJSON() ([]byte, error) { return encode(r), nil }

// UnmarshalJSON is Parse.
func (r *Record) UnmarshalJSON(data []byte) error {
	parsed, err := Parse(data)
	if err != nil {
		return err
	}
	*r = parsed
	return nil
}

func encode(r Record) []byte {
	b := []byte(`{"version":`)
	b = strconv.AppendInt(b, int64(r.Version), 10)
	b = appendString(append(b, `,"id":`...), r.ID)
	b = append(b, `,"key":`...)
	if r.Key.IsZero() {
		b = append(b, `""`...)
	} else {
		b = appendString(b, r.Key.String())
	}
	b = appendList(b, "endpoints", len(r.Endpoints), func(b []byte, i int) []byte {
		return appendString(b, r.Endpoints[i].String())
	})
	b = appendSet(b, "prefixes", r.Prefixes)
	b = appendSet(b, "addresses", r.Addresses)
	roles := sortedSet(r.Roles)
	b = appendList(b, "roles", len(roles), func(b []byte, i int) []byte { return appendString(b, roles[i]) })
	if len(r.Labels) > 0 {
		b = append(b, `,"labels":`...)
		sep := byte('{')
		for _, k := range slices.Sorted(maps.Keys(r.Labels)) {
			b = appendString(append(b, sep), k)
			b = appendString(append(b, ':'), r.Labels[k])
			sep = ','
		}
		b = append(b, '}')
	}
	if r.Instance != "" {
		b = appendString(append(b, `,"instance":`...), r.Instance)
	}
	b = strconv.AppendUint(append(b, `,"epoch":`...), r.Epoch, 10)
	b = strconv.AppendUint(append(b, `,"generation":`...), r.Generation, 10)
	b = strconv.AppendUint(append(b, `,"sequence":`...), r.Sequence, 10)
	return append(b, '}')
}

func appendList(b []byte, name string, n int, each func(b []byte, i int) []byte) []byte {
	if n == 0 {
		return b
	}
	b = append(append(append(b, `,"`...), name...), `":`...)
	for i := range n {
		if i == 0 {
			b = append(b, '[')
		} else {
			b = append(b, ',')
		}
		b = each(b, i)
	}
	return append(b, ']')
}

func appendSet(b []byte, name string, s prefixes.Set) []byte {
	return appendList(b, name, s.Len(), func(b []byte, i int) []byte {
		b = append(b, '"')
		b = s.At(i).AppendTo(b)
		return append(b, '"')
	})
}

// appendString never fails: what is not UTF-8, which only MarshalJSON lets come here, becomes U+FFFD.
func appendString(b []byte, s string) []byte {
	b, _ = jsontext.AppendQuote(b, s)
	return b
}

// parser reads tokens, not into a struct: so the first thing wrong has its own place, and a list that
// is too long is given up at its limit.
type parser struct{ dec *jsontext.Decoder }

func (p parser) record() (r Record, err *FieldError) {
	err = p.object("", func(name string) (err *FieldError) {
		switch name {
		case "version":
			r.Version, err = p.version()
		case "id":
			r.ID, err = p.string(name)
		case "key":
			r.Key, err = p.key(name)
		case "endpoints":
			r.Endpoints, err = p.endpoints(name)
		case "prefixes":
			r.Prefixes, err = p.prefixes(name)
		case "addresses":
			r.Addresses, err = p.addresses(name)
		case "roles":
			r.Roles, err = p.strings(name, MaxRoles)
			r.Roles = sortedSet(r.Roles)
		case "labels":
			r.Labels, err = p.labels(name)
		case "instance":
			r.Instance, err = p.string(name)
		case "epoch":
			r.Epoch, err = p.uint(name)
		case "generation":
			r.Generation, err = p.uint(name)
		case "sequence":
			r.Sequence, err = p.uint(name)
		default:
			err = syntaxError(p.dec.SkipValue())
		}
		return err
	})
	if err != nil {
		return r, err
	}
	switch _, e := p.dec.ReadToken(); {
	case e == nil:
		return r, fieldError("", "", "has more after its end")
	case e != io.EOF:
		return r, syntaxError(e)
	}
	return r, nil
}

// want makes sure that the next value is of a kind.
func (p parser) want(field string, want jsontext.Kind) *FieldError {
	have := p.dec.PeekKind()
	if have == want {
		return nil
	}
	name, known := kinds[have]
	if !known { // not JSON: reading says why
		_, err := p.dec.ReadToken()
		return syntaxError(err)
	}
	return fieldErrorf(field, "", "is %s, not %s", name, kinds[want])
}

var kinds = map[jsontext.Kind]string{
	'n': "null", 't': "true", 'f': "false", '"': "a string", '0': "a number", '{': "an object", '[': "a list",
}

func (p parser) string(field string) (string, *FieldError) {
	if err := p.want(field, '"'); err != nil {
		return "", err
	}
	t, err := p.dec.ReadToken()
	if err != nil {
		return "", syntaxError(err)
	}
	return t.String(), nil
}

func (p parser) uint(field string) (uint64, *FieldError) {
	if err := p.want(field, '0'); err != nil {
		return 0, err
	}
	raw, err := p.dec.ReadValue()
	if err != nil {
		return 0, syntaxError(err)
	}
	n, err := strconv.ParseUint(string(raw), 10, 64)
	if err != nil {
		return 0, fieldError(field, string(raw), "is not a whole number of 0 to 2^64-1")
	}
	return n, nil
}

func (p parser) version() (int, *FieldError) {
	n, err := p.uint("version")
	if err != nil {
		return 0, err
	}
	if n > 1<<31-1 {
		return 0, fieldError("version", fmt.Sprint(n), "is not a version")
	}
	return int(n), nil
}

func (p parser) object(field string, member func(name string) *FieldError) *FieldError {
	if err := p.want(field, '{'); err != nil {
		return err
	}
	if _, err := p.dec.ReadToken(); err != nil {
		return syntaxError(err)
	}
	for {
		t, err := p.dec.ReadToken()
		if err != nil {
			return syntaxError(err)
		}
		if t.Kind() == '}' {
			return nil
		}
		if err := member(t.String()); err != nil {
			return err
		}
	}
}

// strings reads a list of at most so many.
func (p parser) strings(field string, most int) ([]string, *FieldError) {
	if err := p.want(field, '['); err != nil {
		return nil, err
	}
	if _, err := p.dec.ReadToken(); err != nil {
		return nil, syntaxError(err)
	}
	var list []string
	for p.dec.PeekKind() != ']' {
		if len(list) == most {
			return nil, tooMany(field, most)
		}
		s, err := p.string(element(field, len(list)))
		if err != nil {
			return nil, err
		}
		list = append(list, s)
	}
	if _, err := p.dec.ReadToken(); err != nil {
		return nil, syntaxError(err)
	}
	return list, nil
}

func (p parser) key(field string) (key.Public, *FieldError) {
	s, err := p.string(field)
	if err != nil {
		return key.Public{}, err
	}
	if s == "" {
		return key.Public{}, fieldError(field, "", "is missing")
	}
	k, e := key.ParsePublic(s)
	if e != nil {
		return key.Public{}, &FieldError{Field: field, Reason: "is not a public key: " + e.Error(), Err: e}
	}
	return k, nil
}

func (p parser) endpoints(field string) ([]Endpoint, *FieldError) {
	texts, err := p.strings(field, MaxEndpoints)
	if err != nil || len(texts) == 0 {
		return nil, err
	}
	list := make([]Endpoint, len(texts))
	for i, text := range texts {
		e, why := parseEndpoint(text)
		if why != "" {
			return nil, fieldError(element(field, i), text, why)
		}
		list[i] = e
	}
	return list, nil
}

func (p parser) prefixes(field string) (prefixes.Set, *FieldError) {
	texts, err := p.strings(field, MaxPrefixes)
	if err != nil {
		return prefixes.Set{}, err
	}
	set, e := prefixes.Parse(texts...)
	if e == nil {
		return set, nil
	}
	for i, text := range texts { // which one was it?
		if _, e := prefixes.Parse(text); e != nil {
			return prefixes.Set{}, prefixError(element(field, i), text, e)
		}
	}
	return prefixes.Set{}, &FieldError{Field: field, Reason: "has a bad prefix", Err: e}
}

func (p parser) addresses(field string) (prefixes.Set, *FieldError) {
	texts, err := p.strings(field, MaxAddresses)
	if err != nil {
		return prefixes.Set{}, err
	}
	var all prefixes.Set
	for i, text := range texts {
		one, e := prefixes.Parse(text)
		if e != nil {
			return prefixes.Set{}, prefixError(element(field, i), text, e)
		}
		if why := checkAddress(one.At(0)); why != "" {
			return prefixes.Set{}, fieldError(element(field, i), text, why)
		}
		all = all.Union(one)
	}
	return all, nil
}

func prefixError(field, text string, err error) *FieldError {
	reason := "is not a prefix"
	if e, ok := errors.AsType[*prefixes.Error](err); ok {
		reason = e.Reason
	}
	return &FieldError{Field: field, Value: cut(text), Reason: reason, Err: err}
}

func (p parser) labels(field string) (map[string]string, *FieldError) {
	var labels map[string]string
	err := p.object(field, func(name string) *FieldError {
		if len(labels) == MaxLabels {
			return tooMany(field, MaxLabels)
		}
		value, err := p.string(member(field, name))
		if err != nil {
			return err
		}
		if labels == nil {
			labels = make(map[string]string)
		}
		labels[name] = value
		return nil
	})
	return labels, err
}

// syntaxError turns what the decoder says into a FieldError, and nil into nil.
func syntaxError(err error) *FieldError {
	if err == nil {
		return nil
	}
	if err == io.EOF {
		return fieldError("", "", "is empty")
	}
	s, ok := errors.AsType[*jsontext.SyntacticError](err)
	if !ok {
		return &FieldError{Reason: "is not JSON", Err: err}
	}
	cause := s.Err
	if cause == nil {
		cause = err
	}
	return &FieldError{
		Field:  path(s.JSONPointer),
		Reason: fmt.Sprintf("is not strict JSON: %s, at byte %d", strings.TrimPrefix(cause.Error(), "jsontext: "), s.ByteOffset),
		Err:    err,
	}
}

// path writes a JSON pointer the way this package names fields. The names in it came with the data, and
// are bounded in length and number.
func path(pointer jsontext.Pointer) string {
	const most = 8
	var b strings.Builder
	n := 0
	for token := range pointer.Tokens() {
		if n++; n > most {
			b.WriteString("...")
			break
		}
		switch {
		case token != "" && len(token) <= maxValue && strings.Trim(token, "0123456789") == "":
			fmt.Fprintf(&b, "[%s]", token)
		case n == 1 && len(token) <= maxValue && strings.Trim(token, "abcdefghijklmnopqrstuvwxyz") == "":
			b.WriteString(token)
		default:
			fmt.Fprintf(&b, "[%q]", cut(token))
		}
	}
	return b.String()
}
