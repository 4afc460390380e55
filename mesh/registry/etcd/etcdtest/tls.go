package etcdtest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Files are the PEM files of a cluster with TLS.
type Files struct {
	CA        string // whom to believe, on both sides
	Cert, Key string // for a client
	// For the servers, valid for 127.0.0.1 and localhost. They read them again for each connection.
	ServerCert, ServerKey string
}

// Authority makes certificates.
type Authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority returns one of its own. File is where to put its certificate.
func NewAuthority(t testing.TB, file string) *Authority {
	t.Helper()
	key := newKey(t)
	cert := &x509.Certificate{
		SerialNumber: serial(t), Subject: pkix.Name{CommonName: "etcdtest authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		t.Fatalf("etcdtest: %v", err)
	}
	if cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatalf("etcdtest: %v", err)
	}
	writePEM(t, file, "CERTIFICATE", der)
	return &Authority{cert, key}
}

// Issue writes a certificate with its key, for server and client.
func (a *Authority) Issue(t testing.TB, name, certFile, keyFile string) {
	t.Helper()
	key := newKey(t)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial(t), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:    []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}, a.cert, key.Public(), a.key)
	if err != nil {
		t.Fatalf("etcdtest: %v", err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatalf("etcdtest: %v", err)
	}
	writePEM(t, keyFile, "PRIVATE KEY", private)
	writePEM(t, certFile, "CERTIFICATE", der)
}

// newFiles makes the files of a cluster.
func newFiles(t testing.TB, dir string) Files {
	f := Files{
		CA: filepath.Join(dir, "ca.pem"), Cert: filepath.Join(dir, "client.pem"), Key: filepath.Join(dir, "client-key.pem"),
		ServerCert: filepath.Join(dir, "server.pem"), ServerKey: filepath.Join(dir, "server-key.pem"),
	}
	a := NewAuthority(t, f.CA)
	a.Issue(t, "etcdtest client", f.Cert, f.Key)
	a.Issue(t, "etcdtest server", f.ServerCert, f.ServerKey)
	return f
}

// config is for a client.
func (f Files) config() (*tls.Config, error) {
	ca, err := os.ReadFile(f.CA)
	if err != nil {
		return nil, err
	}
	cert, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	return &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{cert}}, nil
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatalf("etcdtest: %v", err)
	}
	return key
}

func serial(t testing.TB) *big.Int {
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 100))
	if err != nil {
		t.Fatalf("etcdtest: %v", err)
	}
	return n
}

func writePEM(t testing.TB, file, kind string, der []byte) {
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatalf("etcdtest: %v", err)
	}
}
