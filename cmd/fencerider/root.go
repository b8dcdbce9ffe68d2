package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/starintel/fencerider/config"
	"github.com/starintel/fencerider/fence/failpoint"
	"github.com/starintel/fencerider/fence/policy"
	"github.com/starintel/fencerider/leaseclient"
	"github.com/starintel/fencerider/leaseclient/valkeystore"
	"github.com/starintel/fencerider/proxy"
)

// Exit codes. A script can tell a mistake from a service that is away.
const (
	exitOK          = 0
	exitFailure     = 1
	exitUsage       = 2
	exitUnavailable = 3
	exitNoLease     = 4
	exitInterrupted = 130
)

// usageError is a mistake of whoever called.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// exitCode tells which code an error ends with.
func exitCode(err error) int {
	var usage *usageError
	var bad *config.Error
	var file *policy.ParseError
	var invalid *leaseclient.InvalidError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &usage), errors.As(err, &bad), errors.As(err, &file), errors.As(err, &invalid):
		return exitUsage
	case errors.Is(err, valkeystore.ErrInitConflict):
		return exitUsage
	case errors.Is(err, proxy.ErrLease):
		return exitNoLease
	}
	switch leaseclient.CodeOf(err) {
	case leaseclient.CodeUnavailable, leaseclient.CodeOutcomeUnknown:
		return exitUnavailable
	default:
		return exitFailure
	}
}

// version is what this build is.
func version() string {
	v := "devel"
	if info, ok := debug.ReadBuildInfo(); ok {
		if info.Main.Version != "" && info.Main.Version != "(devel)" {
			v = info.Main.Version
		}
	}
	if failpoint.Enabled {
		v += "+failpoints"
	}
	return v
}

// execute runs one command and returns its exit code.
func execute(ctx context.Context, args, environ []string, stdout, stderr io.Writer) int {
	root := newRoot(environ)
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err != nil {
		for line := range strings.Lines(err.Error()) {
			fmt.Fprintf(stderr, "fencerider: %s\n", strings.TrimSpace(line))
		}
	}
	return exitCode(err)
}

// newRoot builds the table of commands.
func newRoot(environ []string) *cobra.Command {
	root := &cobra.Command{
		Use:   "fencerider",
		Short: "Keeps a worker without its lease from writing to CouchDB and RabbitMQ",
		Long: "Fencerider runs beside a worker, keeps its target lease in Valkey, tells it when the\n" +
			"lease is lost, and lets a write or a publish through only under the current lease.\n" +
			"Settings are environment variables; `fencerider config --table` lists them.",
		SilenceUsage: true, SilenceErrors: true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	root.AddCommand(runCommand(environ), initCommand(environ), configCommand(environ), policyCommand(), versionCommand())
	return root
}

// none refuses arguments.
func none(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return &usageError{fmt.Errorf("unexpected argument %q", args[0])}
	}
	return nil
}

// runCommand is the sidecar itself.
func runCommand(environ []string) *cobra.Command {
	return &cobra.Command{
		Use: "run", Short: "Run the sidecar", Args: none,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := config.Load(environ)
			if err != nil {
				return err
			}
			return run(cmd.Context(), c, cmd.ErrOrStderr())
		},
	}
}

// initCommand makes the namespace.
func initCommand(environ []string) *cobra.Command {
	var o valkeystore.InitOptions
	cmd := &cobra.Command{
		Use: "init", Short: "Make the namespace in the lease store, once", Args: none,
		Long: "Makes the namespace that all sidecars of a deployment share. It is safe to repeat: an\n" +
			"existing namespace with the same settings is left alone, one with others is an error.\n" +
			"Use a higher --epoch than ever before after the lease store has lost its data.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := config.Load(environ)
			if err != nil {
				return err
			}
			store, err := openStore(c)
			if err != nil {
				return err
			}
			defer store.Close()
			made, err := store.Init(cmd.Context(), o)
			if err != nil {
				return plain("make the namespace", err)
			}
			if made {
				fmt.Fprintf(cmd.OutOrStdout(), "namespace %s is made\n", c.Namespace)
			} else {
				fmt.Fprintf(cmd.OutOrStdout(), "namespace %s is there already\n", c.Namespace)
			}
			return nil
		},
	}
	cmd.Flags().IntVar(&o.Shards, "shards", valkeystore.DefaultShards, "how many shards; fixed for the life of the namespace")
	cmd.Flags().Uint64Var(&o.Epoch, "epoch", 0, "range of the fencing tokens")
	return cmd
}

// plainError is an error for the person at the terminal, with its cause.
type plainError struct {
	doing string
	err   error
}

func (e *plainError) Error() string {
	le := leaseclient.AsError(e.err)
	text := fmt.Sprintf("cannot %s: %s", e.doing, le.Public())
	if le.Err != nil {
		text += " (" + le.Err.Error() + ")"
	}
	return text
}

func (e *plainError) Unwrap() error { return e.err }

// plain wraps an error for the terminal, where the operator may see the cause.
func plain(doing string, err error) error { return &plainError{doing, err} }

// configCommand shows settings.
func configCommand(environ []string) *cobra.Command {
	var asJSON, table, example bool
	cmd := &cobra.Command{
		Use: "config", Short: "Show the settings in force, secrets hidden", Args: none,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := cmd.OutOrStdout()
			switch {
			case table:
				fmt.Fprint(out, config.Table())
				return nil
			case example:
				fmt.Fprint(out, config.Example())
				return nil
			}
			c, err := config.Load(environ)
			if err != nil {
				return err
			}
			if asJSON {
				b, err := c.JSON()
				if err != nil {
					return err
				}
				fmt.Fprintf(out, "%s\n", b)
				return nil
			}
			fmt.Fprint(out, c.Effective())
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "as JSON")
	cmd.Flags().BoolVar(&table, "table", false, "all settings with defaults and meaning, in Markdown")
	cmd.Flags().BoolVar(&example, "example", false, "a file of all settings to start from")
	cmd.MarkFlagsMutuallyExclusive("json", "table", "example")
	return cmd
}

// policyCommand looks at policy files.
func policyCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "policy", Short: "Look at policy files"}
	var classes []string
	check := &cobra.Command{
		Use: "check FILE", Short: "Say whether a policy file is valid, and what it leaves unprotected",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return &usageError{errors.New("policy check needs one file")}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := readPolicy(args[0], classes)
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s is valid\n", args[0])
			for _, u := range p.Unprotected() {
				fmt.Fprintf(cmd.OutOrStdout(), "unprotected: %s\n", u)
			}
			return nil
		},
	}
	check.Flags().StringSliceVar(&classes, "operation-classes", []string{leaseclient.DefaultComponent}, "closed list of operation classes")
	cmd.AddCommand(check)
	return cmd
}

// readPolicy reads and parses a policy file.
func readPolicy(path string, classes []string) (*policy.Policy, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, &usageError{fmt.Errorf("read policy: %w", err)}
	}
	p, err := policy.Parse(b, policy.ParseOptions{Classes: classes})
	if err != nil {
		return nil, fmt.Errorf("policy %s is not valid:\n%w", path, err)
	}
	return p, nil
}

// versionCommand says what this is.
func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Show the version", Args: none,
		RunE: func(cmd *cobra.Command, _ []string) error {
			fmt.Fprintf(cmd.OutOrStdout(), "fencerider %s\n", version())
			return nil
		},
	}
}
