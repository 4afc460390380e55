package prefixes

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
)

// String returns the elements in canonical order with a space between them:
// "10.0.0.0/8 fd00::/8". It is empty for the empty set.
func (s Set) String() string {
	b, _ := s.AppendText(nil)
	return string(b)
}

// AppendText appends what String returns. It never fails.
func (s Set) AppendText(b []byte) ([]byte, error) {
	for i := range s.Len() {
		if i > 0 {
			b = append(b, ' ')
		}
		b = s.At(i).AppendTo(b)
	}
	return b, nil
}

// MarshalText returns what String returns. It never fails.
func (s Set) MarshalText() ([]byte, error) { return s.AppendText(nil) }

// UnmarshalText reads prefixes and addresses as [Parse] does, with white space
// between them. Unlike Parse it leaves s as it was if there is a bad one.
func (s *Set) UnmarshalText(text []byte) error {
	set, err := Parse(strings.Fields(string(text))...)
	if err != nil {
		return err
	}
	*s = set
	return nil
}

// MarshalJSON returns an array of strings in canonical order, [] for the empty
// set. It never fails.
func (s Set) MarshalJSON() ([]byte, error) {
	b := []byte{'['}
	for i := range s.Len() {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, '"')
		b = s.At(i).AppendTo(b)
		b = append(b, '"')
	}
	return append(b, ']'), nil
}

// UnmarshalJSON reads an array of strings, each as [Parse] reads it; null is
// the empty set. It refuses anything else, and names each value it refuses by
// an *[Error]. On an error s stays as it was.
func (s *Set) UnmarshalJSON(data []byte) error {
	var raw []json.RawMessage
	if err := json.Unmarshal(data, &raw); err != nil {
		if json.Valid(data) {
			return &Error{Value: string(bytes.TrimSpace(data)), Reason: "is not an array of strings"}
		}
		return err
	}
	var errs []error
	texts := make([]string, 0, len(raw))
	for _, r := range raw {
		if r[0] != '"' {
			errs = append(errs, &Error{Value: string(r), Reason: "is not a string"})
			continue
		}
		var t string
		if err := json.Unmarshal(r, &t); err != nil {
			return err
		}
		texts = append(texts, t)
	}
	set, err := Parse(texts...)
	if err = errors.Join(join(errs), err); err != nil {
		return err
	}
	*s = set
	return nil
}
