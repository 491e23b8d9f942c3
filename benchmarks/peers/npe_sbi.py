"""Wall time and draws of plain neural posterior estimation in sbi.

Trains on the simulations in ``--data`` and saves to ``--out`` the posterior
draws for its test sets, the seconds from building the networks to the end of
the fit (imports excluded), and the seconds of drawing, cold and warm.

``NPE(...).train()`` cannot run without a validation set and returns the
weights that scored best on it, so the fit uses sbi's documented custom
training loop: every simulation, every epoch, the last weights.
"""

import argparse
import time

import numpy as np
import sbi
import torch
from sbi.inference import DirectPosterior
from sbi.neural_nets import posterior_nn
from sbi.neural_nets.embedding_nets import FCEmbedding, PermutationInvariantEmbedding


def train(theta, x, epochs, batch, transforms):
    """Fit a DeepSet and a neural spline flow to all of the simulations."""
    row_net = FCEmbedding(input_dim=x.shape[-1], output_dim=64, num_hiddens=64)
    # sbi ends the embedding with a ReLU; the linear layer gives signed summaries.
    set_net = PermutationInvariantEmbedding(row_net, 64, num_hiddens=64, output_dim=64)
    summary = torch.nn.Sequential(set_net, torch.nn.Linear(64, 4))
    sizes = {"hidden_features": 128, "num_transforms": transforms}
    estimator = posterior_nn("nsf", embedding_net=summary, **sizes)(theta, x)
    optimizer = torch.optim.Adam(estimator.parameters(), lr=1e-3)
    estimator.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(theta)).split(batch):
            optimizer.zero_grad()
            estimator.loss(theta[rows], x[rows]).mean().backward()
            torch.nn.utils.clip_grad_norm_(estimator.parameters(), max_norm=5.0)
            optimizer.step()
    return estimator.eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=35)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--transforms", type=int, default=4, help="each changes half of theta")
    args = parser.parse_args()

    with np.load(args.data) as data:
        theta, x, x_test = (torch.from_numpy(data[k]).float() for k in ("theta", "x", "x_test"))
    torch.manual_seed(args.seed)

    # Threads within an operation speed up the draws, not the small training batches.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start = time.perf_counter()
    estimator = train(theta, x, args.epochs, args.batch, args.transforms)
    train_seconds = time.perf_counter() - start
    torch.set_num_threads(threads)

    prior = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
    posterior = DirectPosterior(estimator, prior)
    options = {"max_sampling_batch_size": 1000, "reject_outside_prior": False}
    sample_seconds = []
    for _ in range(2):
        start = time.perf_counter()
        with torch.no_grad():
            draws = posterior.sample_batched((1000,), x_test, **options)
        draws = draws.transpose(0, 1).numpy()
        sample_seconds.append(time.perf_counter() - start)

    def median(run, times=5):
        found = []
        for _ in range(times):
            start = time.perf_counter()
            with torch.no_grad():
                run()
            found.append(time.perf_counter() - start)
        return float(np.median(found))

    one = {"x": x_test[0], "show_progress_bars": False, "reject_outside_prior": False}
    latency = median(lambda: posterior.sample((1000,), **one))
    # Of 100,000 draws: 1,000 for each test set.
    values = torch.from_numpy(draws).transpose(0, 1)
    densities = median(lambda: estimator.log_prob(values, x_test), 3)

    cold, warm = sample_seconds
    version = f"sbi {sbi.__version__}"
    np.savez(
        args.out,
        draws=draws,
        train_seconds=train_seconds,
        sample_seconds_cold=cold,
        sample_seconds=warm,
        # Nothing is compiled: all steps cost the same.
        step_seconds=train_seconds / (args.epochs * -(-len(theta) // args.batch)),
        latency_seconds=latency,
        density_seconds=densities,
        version=version,
    )
    print(f"{version}: train {train_seconds:.2f} s, sample {cold:.2f} s cold, {warm:.2f} s warm")


if __name__ == "__main__":
    main()
