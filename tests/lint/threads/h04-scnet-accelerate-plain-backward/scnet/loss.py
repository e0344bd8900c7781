import torch


def spec_rmse_loss(estimate, sources, stft_config):
    n_sources = estimate.shape[1]
    window = torch.hann_window(stft_config["win_length"], device=estimate.device)
    est = torch.stft(estimate.reshape(-1, estimate.shape[-1]), window=window, return_complex=True, **stft_config)
    ref = torch.stft(sources.reshape(-1, sources.shape[-1]), window=window, return_complex=True, **stft_config)
    diff = torch.view_as_real(est - ref)
    loss = diff.pow(2).reshape(estimate.shape[0], n_sources, -1).mean(-1).sqrt().mean()
    return loss
