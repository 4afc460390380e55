# make test does everything that continuous integration does. Run as root on Debian or Ubuntu, it first
# installs what the tests use besides Go.

.PHONY: test quick packages fmt fmtcheck vet staticcheck lint cross beside quickstart full race kernel vm fuzz bench microbench

GO = go
STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2
VMRUN = github.com/warren-mesh/warren/datapath/internal/vmrun
KERNELS = 6.1 6.12 newest
KERNEL = 6.12
PACKAGE = ./datapath/kernel
VMFLAGS =
RUN =
PLATFORMS = linux/arm64 darwin/arm64 windows/amd64 freebsd/amd64
FUZZTIME = 30s
TESTFLAGS =
TIMEOUT = 15m
BENCH = datapath/internal/bench
BENCHFLAGS = -write

# A checkout owned by another user is no reason to fail: no version is stamped into what is built.
export GOFLAGS = -buildvcs=false

# Packages with nodes that talk to each other are tested one at a time: with the race detector, key exchange is
# slow enough for two to make each other's nodes late.
TIMED = /(netstack|tun|whole|auto|mesh|meshtest|agent|etcd|etcdtest|socks5|relay|expose|quickstart)$$

# The race detector comes late, so that the last lines tell how every package fared.
test: packages fmtcheck vet staticcheck quickstart beside full race

quick:
	$(GO) test -short ./...

packages:
	@echo '== packages'
	@.ci/packages

fmt:
	gofmt -w .

fmtcheck:
	@echo '== gofmt'
	@unformatted=$$(gofmt -l .) || exit 1; \
	if [ -n "$$unformatted" ]; then echo 'run make fmt; not formatted:' $$unformatted; exit 1; fi

# The comparison is a module of its own. The programs that it compares with, which are large, are built by make bench only.
vet:
	@echo '== go vet'
	@$(GO) vet ./...
	@cd $(BENCH) && GOWORK=off $(GO) vet ./...

staticcheck:
	@echo '== staticcheck'
	@$(GO) run $(STATICCHECK) ./...
	@cd $(BENCH) && GOWORK=off $(GO) run $(STATICCHECK) ./...

lint: fmtcheck vet staticcheck

# go vet builds every package, and checks that its tests compile.
cross:
	@for p in $(PLATFORMS); do \
		echo "== go vet for $$p"; \
		GOOS=$${p%/*} GOARCH=$${p#*/} CGO_ENABLED=0 $(GO) vet ./... || exit 1; \
	done

# An emulated machine waits more than it computes, and other platforms are compiled meanwhile, with what it leaves.
beside:
	@log=$$(mktemp) || exit 1; \
	nice -n 19 $(MAKE) --no-print-directory cross >"$$log" 2>&1 & cross=$$!; \
	$(MAKE) --no-print-directory kernel; kernel=$$?; \
	wait $$cross; cross=$$?; cat "$$log"; rm -f "$$log"; \
	[ $$kernel = 0 ] && [ $$cross = 0 ]

quickstart:
	@echo '== quickstart'
	@$(GO) run ./examples/quickstart

# Whole meshes at full size, and what is measured in time, are nothing for the race detector.
full:
	@echo '== full size'
	@$(GO) test -timeout $(TIMEOUT) -p 1 $(TESTFLAGS) -run 'Thousand|FirstByte|NoLoss|Interrupted' ./mesh ./mesh/meshtest ./datapath/internal/hostnet

race:
	@echo '== tests'
	@race=-race; export CGO_ENABLED=1; \
	if ! command -v gcc >/dev/null 2>&1; then \
		echo 'gcc is missing, so the tests run without the race detector'; \
		race= CGO_ENABLED=0; \
	fi; \
	(cd $(BENCH) && GOWORK=off $(GO) test $(TESTFLAGS) ./...) || exit 1; \
	all=$$($(GO) list ./... | grep -v /vmrun$$) && failed=0 || exit 1; \
	$(GO) test $$race -p 2 -timeout $(TIMEOUT) $(TESTFLAGS) $$(echo "$$all" | grep -Ev '$(TIMED)') || failed=1; \
	$(GO) test $$race -p 1 -timeout $(TIMEOUT) $(TESTFLAGS) $$(echo "$$all" | grep -E '$(TIMED)') || failed=1; \
	exit $$failed

# The kernel datapath under real kernels in QEMU (see datapath/internal/vmrun), and the agent on top of it.
# Where that cannot be, it is said why; with CI=true that is a failure.
kernel:
	@.ci/packages kernel
	@echo '== kernels'
	@$(GO) test -count=1 -timeout $(TIMEOUT) $(TESTFLAGS) ./datapath/internal/vmrun
	@for k in $(KERNELS); do \
		$(MAKE) --no-print-directory vm KERNEL=$$k PACKAGE=./datapath/kernel VMFLAGS='-with ip,wg' || exit 1; \
	done
	@$(MAKE) --no-print-directory vm KERNEL=6.12 PACKAGE=./datapath/internal/whole VMFLAGS='-with ip,wg'
	@$(MAKE) --no-print-directory vm KERNEL=6.12 PACKAGE=./datapath/auto VMFLAGS='-with ip,wg,wireguard-go' RUN=Mixed
	@$(MAKE) --no-print-directory vm KERNEL=6.12 PACKAGE=./datapath/kernel VMFLAGS='-append ipv6.disable=1' RUN=NoIPv6AtBoot
	@$(MAKE) --no-print-directory vm KERNEL=6.12 PACKAGE=./examples/agent VMFLAGS= RUN=TestVM

# vm runs one package's tests under one kernel.
vm:
	@echo "== kernel $(KERNEL) $(VMFLAGS): $(PACKAGE)"
	@if CGO_ENABLED=0 $(GO) run $(VMRUN) -kernel $(KERNEL) -check; then \
		CGO_ENABLED=0 $(GO) test -count=1 -timeout $(TIMEOUT) $(TESTFLAGS) -run '$(RUN)' -exec '$(GO) run $(VMRUN) -kernel $(KERNEL) $(VMFLAGS)' $(PACKAGE); \
	elif [ "$${CI:-}" = true ]; then \
		exit 1; \
	else \
		echo "so nothing is tested under kernel $(KERNEL)"; \
	fi

fuzz:
	@for p in $$($(GO) list ./...); do \
		for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz'); do \
			echo "== $$p $$f"; \
			$(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) $$p || exit 1; \
		done; \
	done

# bench compares Warren with others and writes README.md's table and .github/bench.svg; as root, between network
# namespaces, too. BENCHFLAGS=-h says what else it can do: BENCHFLAGS=-short is quicker, and writes nothing.
bench:
	@cd $(BENCH) && mkdir -p ../../../bin && GOWORK=off $(GO) build -o ../../../bin/bench . && exec ../../../bin/bench $(BENCHFLAGS)

microbench:
	$(GO) test -run '^$$' -bench . -benchmem ./...
